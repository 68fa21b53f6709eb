/* A chat-completions server that is never the bottleneck of a benchmark.
 *
 * One thread, epoll, keep-alive HTTP/1.1, no JSON parser: it looks for the few words that decide the answer.
 *
 *   "tools": and no "role":"tool" yet  ->  one call of the tool `lookup`; ten topics are shared by all records
 *   otherwise                          ->  a JSON review of the record whose number follows `record #` in the request
 *   ... and `at length` in the request ->  that call, and behind it a second one with a long argument
 *   "stream":true                      ->  the same as server-sent events, in WRITES writes spread over the latency;
 *                                          with WRITES 0 each token is an event and each event a write
 *
 * The last byte of every answer leaves LATENCY_US microseconds after the last byte of its request came in.
 * GET /stats tells, and resets, how many answers were asked for and how many were in flight at once: the harness uses
 * it to check that every contender did the work and kept to its limit.
 *
 * GET /metrics has what vLLM tells of its load: a cache in which every context fits.
 *
 * usage: server LATENCY_US WRITES [PORT]      prints its port on stdout, ends when its stdin does
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_WRITES = 64, MAX_TOKENS = 256, EVENTS = 256, OUT_BYTES = 64 * 1024, EVENT_TEXT_BYTES = 16, TOKEN_BYTES = 4 };

typedef struct {
    int fd;
    bool busy;                /* an answer is due; what else arrives waits in `in` */
    bool counted;             /* ... and it is a chat completion */
    char *in;
    size_t in_len, in_cap;
    char *out;                /* OUT_BYTES, reused for every answer */
    size_t out_len, out_sent;
    size_t cuts[MAX_TOKENS];  /* where each write ends */
    int n_cuts, next_cut;
    uint64_t asked, due;      /* ns */
    int at;                   /* index in the heap, -1 outside */
} Conn;

static uint64_t latency_ns;
static int stream_writes;
static int epoll_fd, timer_fd;
static Conn **heap;           /* by `due`, earliest first */
static int heap_len, heap_cap;
static uint64_t armed;        /* what the timer is set to, 0 when it is off */
static unsigned long answers, in_flight, peak_in_flight, call_ids;

static void die(const char *what) { perror(what); exit(1); }

static void *grow(void *old, size_t bytes) {
    void *new = realloc(old, bytes);
    if (!new) die("realloc");
    return new;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- the heap of answers that are due ------------------------------------------------------------------------ */

static void place(Conn *c, int at) { heap[at] = c; c->at = at; }

static void sift(Conn *c, int at) {
    for (int up = (at - 1) / 2; at > 0 && heap[up]->due > c->due; up = (at - 1) / 2) { place(heap[up], at); at = up; }
    for (int down = 2 * at + 1; down < heap_len; down = 2 * at + 1) {
        if (down + 1 < heap_len && heap[down + 1]->due < heap[down]->due) down++;
        if (heap[down]->due >= c->due) break;
        place(heap[down], at);
        at = down;
    }
    place(c, at);
}

static void heap_push(Conn *c) {
    if (heap_len == heap_cap) heap = grow(heap, sizeof *heap * (size_t)(heap_cap = heap_cap ? 2 * heap_cap : 1024));
    heap_len++;
    sift(c, heap_len - 1);
}

static void heap_remove(Conn *c) {
    Conn *last = heap[--heap_len];
    if (last != c) sift(last, c->at);
    c->at = -1;
}

static void arm_timer(void) {
    uint64_t due = heap_len ? heap[0]->due : 0;
    if (due == armed) return;
    struct itimerspec t = {.it_value = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)}};
    if (timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &t, NULL)) die("timerfd_settime");
    armed = due;
}

/* --- what an answer looks like ------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static void put(Conn *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    c->out_len += (size_t)vsnprintf(c->out + c->out_len, OUT_BYTES - c->out_len, format, args);
    va_end(args);
    if (c->out_len >= OUT_BYTES) { fputs("an answer is larger than OUT_BYTES\n", stderr); exit(1); }
}

static void put_json(Conn *c, const char *status, const char *body, size_t len) {
    put(c, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%.*s",
        status, len, (int)len, body);
    c->cuts[0] = c->out_len;
    c->n_cuts = 1;
}

/* One server-sent event in a chunk of its own, as servers that write token by token send it. */
static void put_event(Conn *c, const char *delta, const char *finish, const char *tail) {
    char event[1024];
    int len = snprintf(event, sizeof event,
        "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
        "\"model\":\"bench\",\"choices\":[%s%s%s%s%s]%s}\n\n",
        delta ? "{\"index\":0,\"delta\":" : "", delta ? delta : "", delta ? ",\"finish_reason\":" : "",
        delta ? finish : "", delta ? "}" : "", tail);
    put(c, "%x\r\n%s\r\n", (unsigned)len, event);
}

/* An engine whose cache holds every context: a later turn finds all of the turn before it, 694 tokens. */
#define COUNTS(prompt, total, cached) "\"usage\":{\"prompt_tokens\":" prompt ",\"completion_tokens\":74," \
    "\"total_tokens\":" total ",\"prompt_tokens_details\":{\"cached_tokens\":" cached "}}"

static const char *usage_of(bool later) {
    return later ? COUNTS("760", "834", "688") : COUNTS("620", "694", "512");
}

/* The model's text, already escaped for a JSON string. Escapes are two characters, so a cut may not split one. */
static int review(char *text, size_t size, long record) {
    return snprintf(text, size,
        "{\\\"record\\\": %ld, \\\"verdict\\\": \\\"%s\\\", \\\"findings\\\": ["
        "{\\\"line\\\": %ld, \\\"severity\\\": \\\"low\\\", \\\"note\\\": \\\"the name says less than the value\\\"}, "
        "{\\\"line\\\": %ld, \\\"severity\\\": \\\"high\\\", \\\"note\\\": \\\"the loop ends one element early\\\"}]}",
        record, record % 3 ? "suspect" : "clean", record % 97, record % 89 + 100);
}

typedef enum { REVIEW, CALL, CALL_AT_LENGTH } Kind;

#define LONG_TOPIC "what has been seen of it in the years before and what was found then to be its cause, by whom, " \
                   "with what remedy, how long that held, what it cost, and what those who saw it last would do now"

static void put_topic(char *text, size_t size, long record) {
    snprintf(text, size, "{\\\"topic\\\": \\\"topic-%ld\\\"}", record % 10);
}

static void put_long_topic(char *text, size_t size, long record) {
    snprintf(text, size, "{\\\"topic\\\": \\\"%ld: " LONG_TOPIC "\\\"}", record);
}

static void answer_at_once(Conn *c, Kind kind, bool later, long record) {
    char text[1024], body[2048];
    bool tool = kind != REVIEW;
    if (tool) {
        char topic[512];
        put_topic(topic, sizeof topic, record);
        int len = snprintf(text, sizeof text,
            "null,\"tool_calls\":[{\"id\":\"call_%lu\",\"type\":\"function\",\"function\":{\"name\":\"lookup\","
            "\"arguments\":\"%s\"}}", ++call_ids, topic);
        if (kind == CALL_AT_LENGTH) {
            put_long_topic(topic, sizeof topic, record);
            len += snprintf(text + len, sizeof text - (size_t)len,
                ",{\"id\":\"call_%lu\",\"type\":\"function\",\"function\":{\"name\":\"lookup\","
                "\"arguments\":\"%s\"}}", ++call_ids, topic);
        }
        strcpy(text + len, "]");
    } else {
        text[0] = '"';
        int len = review(text + 1, sizeof text - 2, record);
        memcpy(text + 1 + len, "\"", 2);
    }
    int len = snprintf(body, sizeof body,
        "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"bench\","
        "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":%s},"
        "\"finish_reason\":\"%s\"}],%s}",
        text, tool ? "tool_calls" : "stop", usage_of(later));
    put_json(c, "200 OK", body, (size_t)len);
}

static void put_pieces(Conn *c, const char *text, const char *before, const char *after) {
    char delta[256];
    for (size_t at = 0, len = strlen(text); at < len;) {
        size_t most = stream_writes ? EVENT_TEXT_BYTES : TOKEN_BYTES, n = len - at < most ? len - at : most;
        if (text[at + n - 1] == '\\' && text[at + n - 2] != '\\') n++;
        snprintf(delta, sizeof delta, "%s%.*s%s", before, (int)n, text + at, after);
        put_event(c, delta, "null", "");
        at += n;
    }
}

static void put_call(Conn *c, int index, const char *arguments) {
    char delta[256], before[96];
    snprintf(delta, sizeof delta,
        "{\"tool_calls\":[{\"index\":%d,\"id\":\"call_%lu\",\"type\":\"function\","
        "\"function\":{\"name\":\"lookup\",\"arguments\":\"\"}}]}", index, ++call_ids);
    put_event(c, delta, "null", "");
    snprintf(before, sizeof before, "{\"tool_calls\":[{\"index\":%d,\"function\":{\"arguments\":\"", index);
    put_pieces(c, arguments, before, "\"}}]}");
}

/* Equal shares of the bytes, each ending where an event ends. */
static void cut_in_shares(Conn *c, size_t start) {
    for (int i = 1; i < stream_writes; i++) {
        char *from = c->out + start + (c->out_len - start) * (size_t)i / (size_t)stream_writes;
        char *end = memmem(from, (size_t)(c->out + c->out_len - from), "\n\n\r\n", 4);
        if (end) c->cuts[c->n_cuts++] = (size_t)(end + 4 - c->out);
    }
}

static void cut_at_events(Conn *c, size_t start) {
    char *end, *out_end = c->out + c->out_len;
    for (char *from = c->out + start; (end = memmem(from, (size_t)(out_end - from), "\n\n\r\n", 4)); from = end + 4)
        if (c->n_cuts < MAX_TOKENS - 1) c->cuts[c->n_cuts++] = (size_t)(end + 4 - c->out);
}

static void answer_streamed(Conn *c, Kind kind, bool usage, bool later, long record) {
    char text[512], counts[256];
    bool tool = kind != REVIEW;
    put(c, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    size_t start = c->out_len;
    put_event(c, "{\"role\":\"assistant\",\"content\":\"\"}", "null", "");
    if (tool) {
        put_topic(text, sizeof text, record);
        put_call(c, 0, text);
        if (kind == CALL_AT_LENGTH) {
            put_long_topic(text, sizeof text, record);
            put_call(c, 1, text);
        }
    } else {
        review(text, sizeof text, record);
        put_pieces(c, text, "{\"content\":\"", "\"}");
    }
    put_event(c, "{}", tool ? "\"tool_calls\"" : "\"stop\"", "");
    snprintf(counts, sizeof counts, ",%s", usage_of(later));
    if (usage) put_event(c, NULL, NULL, counts);
    put(c, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");

    c->n_cuts = 0;
    if (stream_writes) cut_in_shares(c, start);
    else cut_at_events(c, start);
    c->cuts[c->n_cuts++] = c->out_len;
}

/* --- requests ------------------------------------------------------------------------------------------------ */

static bool says(const char *body, size_t len, const char *key, const char *value) {
    size_t key_len = strlen(key), value_len = strlen(value);
    for (const char *p = body, *end = body + len; (p = memmem(p, (size_t)(end - p), key, key_len));) {
        p += key_len;
        while (p < end && *p == ' ') p++;
        if ((size_t)(end - p) >= value_len && !memcmp(p, value, value_len)) return true;
    }
    return false;
}

static long record_number(const char *body, size_t len) {
    const char *p = memmem(body, len, "record #", 8);
    return p ? strtol(p + 8, NULL, 10) : 0;
}

static void answer_chat(Conn *c, const char *body, size_t len) {
    Kind kind = REVIEW;
    bool later = says(body, len, "\"role\":", "\"tool\"");
    if (says(body, len, "\"tools\":", "") && !later)
        kind = memmem(body, len, "at length", 9) ? CALL_AT_LENGTH : CALL;
    long record = record_number(body, len);
    if (says(body, len, "\"stream\":", "true"))
        answer_streamed(c, kind, says(body, len, "\"include_usage\":", "true"), later, record);
    else
        answer_at_once(c, kind, later, record);
    answers++;
    if (++in_flight > peak_in_flight) peak_in_flight = in_flight;
    c->counted = true;
}

static void answer_other(Conn *c, const char *head, size_t len) {
    char body[512];
    const char *status = "200 OK";
    if (memmem(head, len, " /v1/models ", 12))
        strcpy(body, "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\"}]}");
    else if (memmem(head, len, " /stats ", 8)) {
        snprintf(body, sizeof body, "{\"answers\":%lu,\"peak_in_flight\":%lu}", answers, peak_in_flight);
        answers = 0;
        peak_in_flight = in_flight;
    } else if (memmem(head, len, " /metrics ", 10)) /* as vLLM writes them, with room for 4 million tokens */
        snprintf(body, sizeof body,
            "vllm:num_requests_running{engine=\"0\"} %lu\nvllm:num_requests_waiting{engine=\"0\"} 0\n"
            "vllm:kv_cache_usage_perc{engine=\"0\"} 0.05\nvllm:num_preemptions_total{engine=\"0\"} 0\n"
            "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",engine=\"0\","
            "num_gpu_blocks=\"262144\"} 1\n", in_flight);
    else if (memmem(head, len, " /health ", 9))
        strcpy(body, "{}");
    else {
        status = "404 Not Found";
        strcpy(body, "{\"error\":{\"message\":\"no such path\"}}");
    }
    put_json(c, status, body, strlen(body));
}

static void write_due(Conn *c);

/* Answers the first complete request in `in`, if there is one. */
static void next_request(Conn *c) {
    char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
    if (!end) return;
    size_t head_len = (size_t)(end + 4 - c->in), body_len = 0;
    *end = 0;
    char *length = strcasestr(c->in, "\r\ncontent-length:");
    *end = '\r';
    if (length) body_len = strtoul(length + 17, NULL, 10);
    if (c->in_len < head_len + body_len) return;

    c->out_len = c->out_sent = 0;
    c->next_cut = 0;
    c->busy = true;
    c->asked = now_ns();
    bool chat = memmem(c->in, head_len, " /v1/chat/completions ", 22) != NULL;
    if (chat) answer_chat(c, c->in + head_len, body_len);
    else answer_other(c, c->in, head_len);
    c->in_len -= head_len + body_len;
    memmove(c->in, c->in + head_len + body_len, c->in_len);

    c->due = c->asked + (chat ? latency_ns / (unsigned)c->n_cuts : 0);
    if (chat && latency_ns) heap_push(c);
    else write_due(c);
}

static void close_conn(Conn *c) {
    if (c->at >= 0) heap_remove(c);
    if (c->busy && c->counted) in_flight--;
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

/* Sends up to the next cut. An answer is smaller than a socket's buffer: a short write is a peer that is gone. */
static void write_due(Conn *c) {
    do {
        size_t len = c->cuts[c->next_cut] - c->out_sent;
        if (send(c->fd, c->out + c->out_sent, len, MSG_NOSIGNAL) != (ssize_t)len) { close_conn(c); return; }
        c->out_sent += len;
        c->next_cut++;
    } while (!latency_ns && c->next_cut < c->n_cuts);

    if (c->next_cut < c->n_cuts) {
        c->due = c->asked + latency_ns * (unsigned)(c->next_cut + 1) / (unsigned)c->n_cuts;
        heap_push(c);
        return;
    }
    if (c->counted) in_flight--;
    c->busy = c->counted = false;
    if (c->in_len) next_request(c);
}

static void read_some(Conn *c) {
    for (;;) {
        if (c->in_cap - c->in_len < 4096) c->in = grow(c->in, c->in_cap = c->in_cap ? 2 * c->in_cap : 16384);
        ssize_t n = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len - 1, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (n <= 0) { close_conn(c); return; }
        c->in_len += (size_t)n;
        if (c->in_len < c->in_cap - 1) break; /* the socket is empty; what comes later wakes us again */
    }
    if (!c->busy) next_request(c);
}

/* --- the loop ------------------------------------------------------------------------------------------------ */

static void watch(int fd, void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event)) die("epoll_ctl");
}

static void accept_all(int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        Conn *c = grow(NULL, sizeof *c);
        *c = (Conn){.fd = fd, .at = -1, .out = grow(NULL, OUT_BYTES)};
        watch(fd, c);
    }
}

static int listen_at(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int on = 1;
    address.sin_port = htons(port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, 4096)) die("listen");
    getsockname(fd, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 4 || atoi(argv[2]) < 0 || atoi(argv[2]) > MAX_WRITES) {
        fprintf(stderr, "usage: server LATENCY_US WRITES (0 to %d) [PORT]\n", MAX_WRITES);
        return 2;
    }
    latency_ns = strtoull(argv[1], NULL, 10) * 1000u;
    stream_writes = atoi(argv[2]);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);

    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    int listener = listen_at(argc == 4 ? atoi(argv[3]) : 0);
    static char is_listener, is_timer, is_stdin;
    watch(listener, &is_listener);
    watch(timer_fd, &is_timer);
    watch(STDIN_FILENO, &is_stdin);

    for (struct epoll_event events[EVENTS];;) {
        arm_timer();
        int n = epoll_wait(epoll_fd, events, EVENTS, -1);
        if (n < 0 && errno != EINTR) die("epoll_wait");
        bool time_up = false;
        for (int i = 0; i < n; i++) {
            void *what = events[i].data.ptr;
            if (what == &is_listener) accept_all(listener);
            else if (what == &is_timer) time_up = true;
            else if (what == &is_stdin) return 0;
            else read_some(what);
        }
        /* After the reads: a connection that is closed here is in no event still to be looked at. */
        if (time_up) {
            uint64_t fired, now = now_ns();
            (void)!read(timer_fd, &fired, sizeof fired);
            armed = 0;
            while (heap_len && heap[0]->due <= now) {
                Conn *c = heap[0];
                heap_remove(c);
                write_due(c);
            }
        }
    }
}
