"""Results by name: in the process, in a real Redis, in both; and without the Redis that was named."""

from __future__ import annotations

import threading

import pytest

from jaxbench import result_cache
from jaxbench.result_cache import LocalCache, RedisCache, ResultCacheConfig
from tests import redis_server


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with redis_server.running(tmp_path_factory.mktemp("redis")) as url:
        yield url


def test_the_least_recently_used_results_go():
    cache = LocalCache(3)
    cache.write({b"a": b"1", b"b": b"2", b"c": b"3"})
    assert cache.read([b"a", b"x"]) == [b"1", None]
    cache.write({b"d": b"4"})
    assert cache.read([b"a", b"b", b"c", b"d"]) == [b"1", None, b"3", b"4"] and len(cache) == 3


def test_threads_share_a_process_cache():
    cache, problems = LocalCache(50), []

    def work(number: int) -> None:
        for i in range(300):
            name = b"%d" % (i % 80)
            cache.write({name: name})
            problems.extend(found for found in cache.read([name]) if found not in (None, name))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert problems == [] and len(cache) == 50


def test_processes_share_a_redis_and_its_results_go_after_a_time(address):
    import redis

    one, other = ResultCacheConfig(url=address, keep_s=60).open(), ResultCacheConfig(url=address, entries=0).open()
    one.write({b"name": b"\x00result"})
    assert other.read([b"name", b"none", b"name"]) == [b"\x00result", None, b"\x00result"]
    client = redis.Redis.from_url(address)
    assert 0 < client.ttl(result_cache.PREFIX + b"name") <= 60
    client.flushall()
    assert other.read([b"name"]) == [None] and one.read([b"name"]) == [b"\x00result"], "kept by the process, too"
    client.close()


def test_what_redis_had_is_kept_by_the_process(address):
    ResultCacheConfig(url=address).open().write({b"far": b"1"})
    near = LocalCache(10)
    layers = result_cache.Layers([near, RedisCache(address, keep_s=10)])
    assert near.read([b"far"]) == [None]
    assert layers.read([b"far"]) == [b"1"] and near.read([b"far"]) == [b"1"]


def test_more_names_than_fit_a_call_are_read_and_written(address, monkeypatch):
    monkeypatch.setattr(result_cache, "MANY", 7)
    cache, many = RedisCache(address, keep_s=10), {b"many%d" % i: b"%d" % i for i in range(50)}
    cache.write(many)
    assert cache.read(list(many)) == list(many.values())


def test_without_the_redis_results_are_missing_and_nothing_fails(tmp_path, caplog):
    pytest.importorskip("redis")
    for address in (f"redis://127.0.0.1:{redis_server.free_port()}/0", f"unix://{tmp_path}/none.sock"):
        caplog.clear()
        cache = ResultCacheConfig(url=address).open()
        cache.write({b"a": b"1"})
        assert cache.read([b"a", b"b"]) == [b"1", None], "the process has its own"
        assert [record.message for record in caplog.records] == ["redis is not there"], "said once, then not tried"


def test_a_redis_that_comes_back_is_asked_again(tmp_path, monkeypatch):
    pytest.importorskip("redis")
    monkeypatch.setattr(result_cache, "PAUSE_S", 0.0)
    port = redis_server.free_port()
    cache = RedisCache(f"redis://127.0.0.1:{port}/0", keep_s=10)
    assert cache.read([b"a"]) == [None]
    with redis_server.running(tmp_path, port=port):
        cache.write({b"a": b"1"})
        assert cache.read([b"a"]) == [b"1"]


@pytest.mark.parametrize("url", ["http://host", "localhost:6379", "", "redis"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match=r"wanted one of redis://, rediss://, unix://"):
        ResultCacheConfig(url=url)


def test_an_address_that_makes_texts_of_results_is_refused():
    with pytest.raises(ValueError, match="decode_responses=true; results are bytes"):
        RedisCache("redis://127.0.0.1:1/0?decode_responses=true", keep_s=10)


def test_a_login_stands_in_the_environment_and_is_never_shown(tmp_path, monkeypatch):
    for login in ("redis://user:secret@host", "redis://host/0?password=secret", "unix://a.sock?db=1&username=secret"):
        with pytest.raises(ValueError, match="JAXBENCH_REDIS_PASSWORD") as caught:
            ResultCacheConfig(url=login)
        assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="not shown"):
        ResultCacheConfig(url="redis://host:port/0").open()
    with redis_server.running(tmp_path, "--requirepass", "word") as url:
        for password, found in (("word", b"1"), ("wrong", None)):
            monkeypatch.setenv(result_cache.PASSWORD_VARIABLE, password)
            cache = RedisCache(url, keep_s=10)
            cache.write({b"a": b"1"})
            assert cache.read([b"a"]) == [found]
