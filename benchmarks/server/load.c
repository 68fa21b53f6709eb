/* How many answers a second can the server give? As many connections as a benchmark uses, each sending its next request
 * when the answer to the last one is complete, for a number of seconds. Prints answers per second.
 *
 * usage: load PORT CONNECTIONS SECONDS < request      (the whole HTTP request, head and body)
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST_BYTES = 64 * 1024, ANSWER_BYTES = 64 * 1024, EVENTS = 256 };

typedef struct {
    int fd;
    size_t len;
    char answer[ANSWER_BYTES];
} Conn;

static char request[REQUEST_BYTES];
static size_t request_len;

static void die(const char *what) { perror(what); exit(1); }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void ask(Conn *c) {
    c->len = 0;
    if (send(c->fd, request, request_len, MSG_NOSIGNAL) != (ssize_t)request_len) die("send");
}

/* Only what this server sends: a content-length, or chunks that end with an empty one. */
static bool complete(const Conn *c) {
    const char *end = memmem(c->answer, c->len, "\r\n\r\n", 4);
    if (!end) return false;
    const char *length = memmem(c->answer, (size_t)(end - c->answer), "content-length: ", 16);
    if (length) return c->len == (size_t)(end + 4 - c->answer) + strtoul(length + 16, NULL, 10);
    return !memcmp(c->answer + c->len - 7, "\r\n0\r\n\r\n", 7);
}

static Conn *connect_to(int port, int epoll_fd) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    Conn *c = calloc(1, sizeof *c);
    if (!c || (c->fd = socket(AF_INET, SOCK_STREAM, 0)) < 0) die("socket");
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event)) die("epoll_ctl");
    return c;
}

int main(int argc, char **argv) {
    if (argc != 4) return fputs("usage: load PORT CONNECTIONS SECONDS < request\n", stderr), 2;
    request_len = fread(request, 1, sizeof request, stdin);
    int epoll_fd = epoll_create1(0);
    for (int i = 0; i < atoi(argv[2]); i++) ask(connect_to(atoi(argv[1]), epoll_fd));

    unsigned long answers = 0;
    double start = now(), end = start + atof(argv[3]);
    for (struct epoll_event events[EVENTS]; now() < end;) {
        int n = epoll_wait(epoll_fd, events, EVENTS, 100);
        for (int i = 0; i < n; i++) {
            Conn *c = events[i].data.ptr;
            ssize_t got = recv(c->fd, c->answer + c->len, sizeof c->answer - c->len, 0);
            if (got <= 0) die("recv");
            c->len += (size_t)got;
            if (complete(c)) { answers++; ask(c); }
        }
    }
    printf("%.0f\n", (double)answers / (now() - start));
    return 0;
}
