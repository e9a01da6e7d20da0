"""Throughput, FLOPs and records of a run."""

import resource
import threading
import time
from types import SimpleNamespace

import jax
import pytest
import torch

from jaxbench.lora.config import LoraConfig, with_lora
from jaxbench.memory.decoder_config import DecoderMemory, with_memory
from jaxbench.parity.cases import GPT2, LLAMA
from jaxbench.training import engine, observe, precision
from jaxbench.training.step_config import OptimizerConfig
from torch_ref.training import engine as torch_engine


def test_throughput_counts_windows_only():
    clock = iter([0.0, 2.0, 10.0, 14.0])
    found = observe.Throughput(clock=lambda: next(clock))
    found.start()
    found.start()  # an open window goes on
    found.pause(100)
    assert found.rate == 50.0
    found.start()
    found.pause(100)
    assert found.rate == 25.0 and found.mean == pytest.approx(200 / 6)


def test_flops_per_token_by_hand():
    # Tied: the embedding is the head. 2 layers of q 32x32, k and v 32x16, o 32x32, three of 32x48, two norms of 32.
    multiplied = 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    whole = 6 * multiplied + 12 * 2 * 32 * 10
    assert observe.flops_per_token(LLAMA, 10, is_causal=False) == whole
    assert observe.flops_per_token(LLAMA, 10, is_causal=True) == whole - 6 * 2 * 32 * 10
    positions = observe.flops_per_token(GPT2.model_copy(update={"max_seq_len": 999}), 10, is_causal=False)
    assert positions == observe.flops_per_token(GPT2, 10, is_causal=False)


def test_attention_costs_the_keys_that_a_layer_lets_a_token_see():
    def attention(shape, tokens):
        whole, causal = (observe.flops_per_token(shape, tokens, is_causal=is_causal) for is_causal in (False, True))
        without = observe.flops_per_token(shape, 0, is_causal=False)
        return (whole - without) / (12 * 32), (causal - without) / (12 * 32)

    window = LLAMA.model_copy(update={"sliding_window": 4})
    assert attention(LLAMA, 64) == (2 * 64, 2 * 32)
    assert attention(window, 64)[0] == 2 * 4 and attention(window, 3) == (2 * 3, 2 * 1.5)
    mean = (
        sum(min(i + 0.5, 4) for i in range(64)) / 64
    )  # of the keys of token i, half of itself until the window is full
    assert attention(window, 64)[1] == pytest.approx(2 * mean)
    mixed = LLAMA.model_copy(update={"sliding_window": 4, "global_every": 2})
    assert attention(mixed, 64)[0] == 4 + 64


def test_a_layer_with_memory_costs_its_own_attention():
    neural = {"d_model": 32, "num_heads": 4, "head_dim": 8, "chunk_size": 4}
    for kind, keys in (({"kind": "lmm"}, 0), ({"kind": "mag", "window": 4}, 4), ({"kind": "lmm", "insert": True}, 64)):
        shape = with_memory(LLAMA, DecoderMemory(**kind, layers=(1,), neural=neural))
        products = observe.flops_per_token(shape, 0, is_causal=False)
        assert observe.flops_per_token(shape, 64, is_causal=False) - products == 12 * 32 * (64 + keys), kind


def test_what_is_not_trained_has_no_gradient_of_its_own_to_count():
    shape = with_lora(LLAMA, LoraConfig(rank=3, targets=("q_proj",)))
    adapters = 2 * (32 * 3 + 3 * 32)
    frozen = observe.flops_per_token(LLAMA, 10, is_causal=False) - 12 * 2 * 32 * 10
    is_trained = OptimizerConfig(trained="adapters").is_trained
    found = observe.flops_per_token(shape, 10, is_causal=False, is_trained=is_trained)
    assert found == frozen * 4 / 6 + 6 * adapters + 12 * 2 * 32 * 10
    share = observe.utilisation(shape, 10, tokens_per_s=2.0, peak=4.0, is_trained=is_trained)
    assert share["mfu"] == found / 2


def test_known_devices_have_a_peak_and_others_none():
    assert observe.peak_flops("NVIDIA H200", "bfloat16") == 989.4e12
    assert observe.peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert observe.peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert observe.peak_flops("NVIDIA H100 NVL", "bfloat16") is None
    assert observe.peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16") is None
    assert observe.peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert observe.peak_flops("NVIDIA RTX A1000 Laptop GPU", "bfloat16") is None
    assert observe.peak_flops("cpu", "float32") is None and observe.peak_flops("NVIDIA H200", "float64") is None


def test_products_of_float32_on_a_gpu_are_held_against_the_peak_of_the_type_that_they_are_rounded_to(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    state = SimpleNamespace(policy=precision.POLICIES["float32"], device="cuda")
    assert engine.Engine.product_type(state) == "tf32" and torch_engine.Engine.product_type(state) == "float32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with jax.default_matmul_precision("highest"):
        assert engine.Engine.product_type(state) == "float32" and torch_engine.Engine.product_type(state) == "tf32"
    state.policy = precision.POLICIES["bfloat16"]
    assert engine.Engine.product_type(state) == torch_engine.Engine.product_type(state) == "bfloat16"


def test_the_product_that_measures_an_unknown_accelerator_takes_far_longer_than_to_start(monkeypatch):
    assert 2 * observe.gemm_size("gpu") ** 3 / observe.peak_flops("NVIDIA H200", "bfloat16") > 1e-3
    assert observe.gemm_size("cpu") == 1024

    def timed(call, repeats):
        call()
        return {"seconds": [2.0, 1.0]}

    monkeypatch.setattr(observe, "gemm_size", lambda device: 8 if device == "cpu" else 0)
    monkeypatch.setattr(engine.worker, "timed", timed)
    state = SimpleNamespace(policy=precision.POLICIES["float32"], device="cpu")
    rates = (each.matmul_rate(state) for each in (engine.Engine, torch_engine.Engine))
    assert set(rates) == {2.0 * 8**3}


def test_the_peak_of_a_device_without_a_data_sheet_is_measured_once(monkeypatch):
    monkeypatch.setattr(observe, "_MEASURED", {})
    first, second = (
        SimpleNamespace(device_kind=lambda: "cpu", product_type=lambda: "float32", matmul_rate=lambda rate=rate: rate)
        for rate in (3.0, 7.0)
    )
    assert observe.peak_of(first, None) == observe.peak_of(second, None) == 3.0
    assert observe.peak_of(second, 2.0) == 2e12


def test_records_are_taken_back_and_a_line_that_was_cut_off_is_dropped(tmp_path):
    records = observe.Records(tmp_path / "r.jsonl")
    assert records.read() == []
    records.add([{"step": 1, "loss": 0.1}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": 0.3}])
    with open(records.path, "a") as file:
        file.write('{"step": 4, "lo')
    assert records.read() == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": None}, {"step": 3, "loss": 0.3}]
    records.keep_until(2)
    assert records.path.read_text() == '{"step": 1, "loss": 0.1}\n{"step": 2, "loss": null}\n'


@pytest.mark.parametrize("line", [b"xx", b"", b"[1]", b'{"loss": 0.5}', b"\xff"])
def test_a_line_that_is_no_record_of_a_step_is_named(line, tmp_path):
    records = observe.Records(tmp_path / "r.jsonl")
    records.path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl line 2 is no record of a step .*, wanted JSON with one; take the"):
        records.keep_until(1)
    assert records.path.read_bytes() == b'{"step": 1}\n' + line + b'\n{"step": 2}\n'


def test_no_scalar_that_is_not_finite_reaches_tensorboard(tmp_path, monkeypatch):
    board, written = observe.Board(tmp_path, start=0), []
    monkeypatch.setattr(board._writer, "add_scalar", lambda *row: written.append(row))
    board.add(3, {"loss": 1.5, "norm": float("nan"), "scale": float("inf"), "skipped": 2})
    board.close()
    assert written == [("loss", 1.5, 3), ("skipped", 2, 3)]


def test_a_full_disk_drops_the_board_with_one_line_and_the_run_goes_on(tmp_path, capfd):
    kept, threads = resource.getrlimit(resource.RLIMIT_FSIZE), threading.active_count()
    board = observe.Board(tmp_path / "board", start=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, kept[1]))

    def run():
        for step in range(600):
            board.add(step, {"loss": 1.0, "norm": 2.0})
        board.close()

    try:
        runs = threading.Thread(target=run, daemon=True)
        runs.start()
        runs.join(60)
        assert not runs.is_alive(), "it waits for a thread that has ended"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    said = capfd.readouterr()
    assert said.err == f"cannot write {tmp_path / 'board'}: File too large; the run goes on without TensorBoard\n"
    assert said.out == "" and threading.active_count() <= threads + 1  # the queue's own


def test_the_board_can_be_read_back(tmp_path):
    board = observe.Board(tmp_path / "a:b", start=0)
    board.add(3, {"loss": 1.5})
    board.close()
    (path,) = (tmp_path / "a:b").iterdir()
    assert path.name.startswith("events.out.tfevents.") and b"loss" in path.read_bytes()


def test_tensorboard_shows_the_step_that_a_run_goes_on_from_and_none_that_it_takes_again(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    for start, last in ((0, 5), (4, 6)):  # the second goes on from step 4, whose checkpoint was the last one
        board = observe.Board(tmp_path / str(start), start=start)
        for step in range(start + 1, last + 1):
            board.add(step, {"loss": start + step / 10})
        board.close()
    for number, start in enumerate((0, 4)):  # files of one second have one name, which TensorBoard reads in order
        (file,) = (tmp_path / str(start)).iterdir()
        (tmp_path / "both").mkdir(exist_ok=True)
        file.rename(tmp_path / "both" / f"events.out.tfevents.{number}")
    shown = event_accumulator.EventAccumulator(str(tmp_path / "both")).Reload().Scalars("loss")
    assert [each.step for each in shown] == [1, 2, 3, 4, 5, 6]
    assert [each.value for each in shown] == pytest.approx([0.1, 0.2, 0.3, 0.4, 4.5, 4.6])


def test_scalars_are_on_disk_soon_though_the_run_is_killed_before_it_closes_them(tmp_path):
    board = observe.Board(tmp_path, start=0)
    (path,) = tmp_path.iterdir()
    try:
        board.add(1, {"loss": 1.5})
        until = time.monotonic() + 10 * observe.FLUSH_S
        while b"loss" not in path.read_bytes():
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        board.close()
