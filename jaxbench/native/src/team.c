/* Threads that share the chunks of a phase.
 *
 * The caller offers one phase after another and works at it itself. Helpers take chunks of the phase that is offered when
 * they arrive; one that arrives late, or never, is not waited for: only a chunk that somebody has begun is. The team
 * lives until the last helper that was asked has looked in. Which thread computes a chunk decides nothing about its result.
 *
 * A helper that loses its processor in the middle of a chunk holds everybody up. Where calls wait for helpers longer than
 * these save, the next calls ask for no help for a while (see weigh): on a machine whose processors are taken for good one
 * thread is faster than two. A process that takes a tenth of a processor costs no more than it takes.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "native.h"

#define MAX_PHASES 16
#define MAX_THREADS 256
#define MAX_LENT 16             /* teams at work or waiting for late helpers, each with its scratch: more get no helpers */
#ifndef LOSS_NS
#define LOSS_NS 6000000         /* two turns of another process: no help is asked for after so much time lost by waiting */
#endif
#define HOLD_NS 20000000        /* so long, at first, no help is asked for; doubled up to HOLD_NS_MOST */
#define HOLD_NS_MOST 320000000
#define SPINS_BEFORE_YIELD 2000
#define LINE 64

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

typedef struct {
  chunk_function run;
  void *context;
  int64_t chunks;
  _Alignas(LINE) _Atomic int64_t next;
  _Alignas(LINE) _Atomic int64_t done;
} phase;

struct team {
  phase phases[MAX_PHASES];
  _Alignas(LINE) _Atomic int64_t offered; /* phases offered so far; -1: the call is over */
  _Alignas(LINE) _Atomic int64_t references;
  int64_t num_phases, threads, waited_ns, began_ns;
  pthread_t caller;
  void *scratch;
  int64_t scratch_bytes;
  team *next_free;
};

static pthread_mutex_t free_lock = PTHREAD_MUTEX_INITIALIZER;
static team *free_teams;
static int64_t num_lent; /* teams that are not free */
static _Atomic int64_t alone_until_ns, hold_ns = HOLD_NS, lost_ns;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void drop(team *t) {
  if (atomic_fetch_sub_explicit(&t->references, 1, memory_order_acq_rel) != 1) return;
  pthread_mutex_lock(&free_lock);
  t->next_free = free_teams;
  free_teams = t;
  num_lent--;
  pthread_mutex_unlock(&free_lock);
}

static void work(phase *p) {
  for (;;) {
    int64_t chunk = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
    if (chunk >= p->chunks) return;
    p->run(p->context, chunk);
    atomic_fetch_add_explicit(&p->done, 1, memory_order_release);
  }
}

static void help(void *data) {
  team *t = data;
  int64_t seen = 0;
  if (pthread_equal(t->caller, pthread_self())) { /* a full queue runs the task where it was asked for */
    drop(t);
    return;
  }
  for (int64_t spins = 0;; spins++) {
    int64_t offered = atomic_load_explicit(&t->offered, memory_order_acquire);
    if (offered < 0) break;
    if (offered > seen) {
      work(&t->phases[offered - 1]);
      seen = offered;
      spins = 0;
    } else if (spins > SPINS_BEFORE_YIELD) {
      sched_yield();
      spins = 0;
    } else {
      PAUSE();
    }
  }
  drop(t);
}

static team *give_up(team *t) {
  free(t);
  pthread_mutex_lock(&free_lock);
  num_lent--;
  pthread_mutex_unlock(&free_lock);
  return NULL;
}

static team *take_team(int64_t scratch_bytes, int *is_crowded) {
  pthread_mutex_lock(&free_lock);
  team *t = free_teams;
  if (t) free_teams = t->next_free;
  *is_crowded = ++num_lent > MAX_LENT;
  pthread_mutex_unlock(&free_lock);
  if (!t) {
    if (posix_memalign((void **)&t, LINE, sizeof *t)) return give_up(NULL);
    memset(t, 0, sizeof *t);
  }
  if (t->scratch_bytes < scratch_bytes) {
    free(t->scratch);
    t->scratch = NULL;
    t->scratch_bytes = 0;
    if (posix_memalign(&t->scratch, LINE, (size_t)scratch_bytes)) return give_up(t);
    t->scratch_bytes = scratch_bytes;
  }
  return t;
}

/* NULL where there is no memory for the scratch. */
team *team_begin(int64_t threads, int64_t scratch_bytes, schedule_function schedule, void *host) {
  int is_crowded;
  team *t = take_team(scratch_bytes, &is_crowded);
  if (!t) return NULL;
  if (threads < 1 || is_crowded) threads = 1;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (threads > 1 && atomic_load_explicit(&alone_until_ns, memory_order_relaxed) > 0) {
    if (now_ns() < atomic_load_explicit(&alone_until_ns, memory_order_relaxed)) threads = 1;
    else atomic_store_explicit(&alone_until_ns, 0, memory_order_relaxed);
  }
  t->num_phases = t->waited_ns = 0;
  t->began_ns = threads > 1 ? now_ns() : 0;
  t->threads = threads;
  t->caller = pthread_self();
  atomic_store_explicit(&t->offered, 0, memory_order_relaxed);
  atomic_store_explicit(&t->references, threads, memory_order_release);
  for (int64_t i = 1; i < threads; i++)
    if (schedule(host, help, t)) drop(t);
  return t;
}

void *team_scratch(team *t) { return t->scratch; }

int64_t team_threads(const team *t) { return t->threads; }

static void wait_for(team *t, phase *p) {
  int64_t start = 0;
  for (int64_t spins = 0; atomic_load_explicit(&p->done, memory_order_acquire) < p->chunks; spins++) {
    if (spins == 0) start = now_ns();
    if (spins % SPINS_BEFORE_YIELD == SPINS_BEFORE_YIELD - 1) sched_yield();
    else PAUSE();
  }
  if (start) t->waited_ns += now_ns() - start;
}

void team_run(team *t, chunk_function run, void *context, int64_t chunks) {
  if (t->threads == 1 || chunks <= 1 || t->num_phases == MAX_PHASES) {
    for (int64_t i = 0; i < chunks; i++) run(context, i);
    return;
  }
  phase *p = &t->phases[t->num_phases++];
  p->run = run;
  p->context = context;
  p->chunks = chunks;
  atomic_store_explicit(&p->next, 0, memory_order_relaxed);
  atomic_store_explicit(&p->done, 0, memory_order_relaxed);
  atomic_store_explicit(&t->offered, t->num_phases, memory_order_release);
  work(p);
  wait_for(t, p);
}

/* What was lost by waiting, over all calls with helpers: n threads that never wait save (n - 1) / n of what one thread takes,
 * so two thirds of that share of a call may be waited; what is waited beyond is lost, what is not waited makes up for losses.
 * The sum stays at LOSS_NS after a hold, so that the next long wait asks for another, twice as long.
 */
static void weigh(const team *t) {
  int64_t now = now_ns(), may_wait = (now - t->began_ns) * (t->threads - 1) * 2 / (t->threads * 3);
  int64_t hold = atomic_load_explicit(&hold_ns, memory_order_relaxed);
  int64_t lost = atomic_load_explicit(&lost_ns, memory_order_relaxed) + t->waited_ns - may_wait;
  if (lost > LOSS_NS) {
    lost = LOSS_NS;
    atomic_store_explicit(&alone_until_ns, now + hold, memory_order_relaxed);
    atomic_store_explicit(&hold_ns, hold * 2 > HOLD_NS_MOST ? HOLD_NS_MOST : hold * 2, memory_order_relaxed);
  } else if (hold > HOLD_NS) {
    atomic_fetch_sub_explicit(&hold_ns, HOLD_NS / 100, memory_order_relaxed);
  }
  atomic_store_explicit(&lost_ns, lost > 0 ? lost : 0, memory_order_relaxed);
}

void team_end(team *t) {
  if (t->threads > 1) weigh(t);
  atomic_store_explicit(&t->offered, -1, memory_order_release);
  drop(t);
}

/* A pool for hosts that have none to lend: PyTorch through ctypes, and the tests. Threads are made when first asked for. */

#define MAX_QUEUE (MAX_LENT * MAX_THREADS)

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pool_filled = PTHREAD_COND_INITIALIZER;
static struct { void (*task)(void *); void *data; } queue[MAX_QUEUE];
static _Atomic int64_t queued, taken; /* tasks ever put in and taken out */
static int64_t pool_threads, idle_threads;

static void *serve(void *unused) {
  (void)unused;
  for (;;) {
    for (int64_t spins = 0; spins < 20000; spins++) { /* some 100 us: the next call of a step comes sooner */
      if (atomic_load_explicit(&queued, memory_order_relaxed) > atomic_load_explicit(&taken, memory_order_relaxed)) break;
      PAUSE();
    }
    pthread_mutex_lock(&pool_lock);
    while (queued == taken) {
      idle_threads++;
      pthread_cond_wait(&pool_filled, &pool_lock);
      idle_threads--;
    }
    int64_t place = taken % MAX_QUEUE;
    void (*task)(void *) = queue[place].task;
    void *data = queue[place].data;
    taken++;
    pthread_mutex_unlock(&pool_lock);
    task(data);
  }
  return NULL;
}

/* After a fork the child has no threads but its own; it makes new ones when it asks. */
static void forget_threads(void) {
  pthread_mutex_init(&pool_lock, NULL);
  pthread_cond_init(&pool_filled, NULL);
  pthread_mutex_init(&free_lock, NULL);
  pool_threads = idle_threads = num_lent = 0;
  queued = taken = 0;
  free_teams = NULL;
}

/* When the library is loaded: a call without helpers takes locks too. */
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* host: the number of threads, as a pointer's value. */
int own_pool_schedule(void *host, void (*task)(void *), void *data) {
  pthread_mutex_lock(&pool_lock);
  while (pool_threads < (int64_t)(intptr_t)host - 1 && pool_threads < MAX_THREADS - 1) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, NULL)) break;
    pthread_detach(thread);
    pool_threads++;
  }
  int is_full = queued - taken == MAX_QUEUE || pool_threads == 0;
  if (!is_full) {
    queue[queued % MAX_QUEUE].task = task;
    queue[queued % MAX_QUEUE].data = data;
    queued++;
    if (idle_threads) pthread_cond_signal(&pool_filled);
  }
  pthread_mutex_unlock(&pool_lock);
  return is_full;
}
