/* Teams whose helpers come late, never, from two callers at once, or in a process that was forked. Part of kernels_check.c. */

typedef struct { void (*task)(void *); void *data; } late_task;

/* A host that refuses every third task and starts a thread for each of the others, which may arrive after the call. */
static pthread_t late_threads[4096];
static int64_t num_late;
static _Atomic int64_t asked;

static void *late_helper(void *data) {
  late_task *one = data;
  for (int64_t i = (int64_t)(intptr_t)one % 7; i > 0; i--) sched_yield();
  one->task(one->data);
  free(one);
  return NULL;
}

static int late_schedule(void *host, void (*task)(void *), void *data) {
  (void)host;
  if (atomic_fetch_add(&asked, 1) % 3 == 0 || num_late == 4096) return 1;
  late_task *one = malloc(sizeof *one);
  *one = (late_task){task, data};
  if (pthread_create(&late_threads[num_late], NULL, late_helper, one)) return free(one), 1;
  num_late++;
  return 0;
}

static int refusing_schedule(void *host, void (*task)(void *), void *data) { return (void)host, (void)task, (void)data, 1; }

/* A host whose queue is full: the task runs at once, on the thread that asked, and must not wait for its own caller. */
static int full_schedule(void *host, void (*task)(void *), void *data) { return (void)host, task(data), 0; }

/* A host that comes to nothing before all calls are over. */
static late_task postponed[4096];
static int64_t num_postponed;

static int postponing_schedule(void *host, void (*task)(void *), void *data) {
  (void)host;
  if (num_postponed == 4096) return 1;
  postponed[num_postponed++] = (late_task){task, data};
  return 0;
}

/* Teams that wait for helpers hold memory: calls must not pile them up. */
static void check_waiting_teams(void) {
  void *found[400];
  int64_t num_found = 0;
  snprintf(description, sizeof description, "helpers that do not come");
  for (int64_t i = 0; i < 400; i++) {
    team *t = team_begin(3, 1000, postponing_schedule, NULL);
    int is_new = 1;
    for (int64_t j = 0; j < num_found; j++) is_new &= found[j] != team_scratch(t);
    if (is_new) found[num_found++] = team_scratch(t);
    team_end(t);
  }
  for (int64_t i = 0; i < num_postponed; i++) postponed[i].task(postponed[i].data);
  if (num_found > 50) fail("teams", (double)num_found);
}

typedef struct {
  weights w;
  float *x, *bias, *wanted, *out;
  int64_t rows, calls, wrong;
} call_stream;

static void stream_calls(call_stream *s, schedule_function schedule) {
  for (int64_t i = 0; i < s->calls; i++) {
    int64_t threads = 2 + i % 4, bytes = INSTRUCTION_SET.linear_scratch(&s->w.m, s->rows, 3), size = s->rows * s->w.m.outputs * 4;
    memset(s->out, 0, (size_t)size);
    team *t = team_begin(threads, bytes, schedule, (void *)(intptr_t)threads);
    INSTRUCTION_SET.linear(&s->w.m, s->x, s->rows, s->bias, 3, s->out, t);
    team_end(t);
    s->wrong += memcmp(s->out, s->wanted, (size_t)size) != 0;
  }
}

static void *stream_in_thread(void *data) {
  stream_calls(data, own_pool_schedule);
  return NULL;
}

static call_stream make_stream(int64_t rows, int64_t calls) {
  call_stream s = {make_weights(FORMAT_Q4_0, 96, 200), numbers(rows * 96, 0, 1), numbers(200, 0, 1), fresh(rows * 800), fresh(rows * 800), rows, calls, 0};
  run_linear(&s.w.m, s.x, rows, s.bias, 3, 1, s.wanted);
  return s;
}

static void check_late_helpers(void) {
  call_stream s = make_stream(5, 400);
  snprintf(description, sizeof description, "late helpers");
  stream_calls(&s, late_schedule);
  stream_calls(&s, refusing_schedule);
  stream_calls(&s, full_schedule);
  for (int64_t i = 0; i < num_late; i++) pthread_join(late_threads[i], NULL);
  if (s.wrong) fail("results", (double)s.wrong);
}

static void check_two_callers(void) {
  call_stream s[3] = {make_stream(3, 1500), make_stream(9, 1500), make_stream(1, 1500)};
  pthread_t threads[2];
  snprintf(description, sizeof description, "three callers at once");
  for (int i = 0; i < 2; i++)
    if (pthread_create(threads + i, NULL, stream_in_thread, s + i)) abort();
  stream_calls(s + 2, own_pool_schedule);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  if (s[0].wrong + s[1].wrong + s[2].wrong) fail("results", (double)(s[0].wrong + s[1].wrong + s[2].wrong));
}

/* A child process has none of its parent's threads. */
static void check_fork(void) {
  call_stream s = make_stream(9, 200);
  snprintf(description, sizeof description, "a forked process");
  stream_calls(&s, own_pool_schedule);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    alarm(60);
    stream_calls(&s, own_pool_schedule);
    _exit(s.wrong > 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  if (status != 0) fail("status of the child", status);
  stream_calls(&s, own_pool_schedule);
  if (s.wrong) fail("results", (double)s.wrong);
}

static void check_teams(void) {
  random_state = 1;
  check_waiting_teams();
  check_late_helpers();
  check_two_callers();
  check_fork();
  release();
}
