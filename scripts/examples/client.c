/* A whole client of the raw TCP port, in C99 with sockets and nothing else.  SPEC 2.2, 4, 7.
 *
 *     cc -std=c99 -D_POSIX_C_SOURCE=200809L -o client scripts/examples/client.c
 *     ./client HOST PORT MAX_TOKENS ID [ID ...]
 *
 * Sends the prompt ids, prints the id of each generated token on a line of its own.  Exits 0 after
 * DECODE_DONE, with 1 and the code on stderr after ERROR, with 2 when anything else goes wrong. */
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PREFILL_REQUEST = 30, PREFILL_DONE = 31, DECODE_REQUEST = 34, DECODE_TOKEN = 35,
       DECODE_DONE = 36, ERROR = 45 };

static void fail(const char *why) {
    fprintf(stderr, "client: %s\n", why);
    exit(2);
}

static uint8_t *put(uint8_t *to, uint64_t value, int bytes) { /* little-endian */
    for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(value >> (8 * i));
    return to + bytes;
}

static uint64_t get(const uint8_t *from, int bytes) {
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;) value = value << 8 | from[i];
    return value;
}

static int connect_to(const char *host, const char *port) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found, *at;
    if (getaddrinfo(host, port, &hints, &found) != 0) fail("unknown host or port");
    for (at = found; at; at = at->ai_next) {
        int sock = socket(at->ai_family, at->ai_socktype, at->ai_protocol);
        if (sock >= 0 && connect(sock, at->ai_addr, at->ai_addrlen) == 0) {
            freeaddrinfo(found);
            return sock;
        }
        if (sock >= 0) close(sock);
    }
    fail("cannot connect");
    return -1;
}

static void receive(int sock, uint8_t *to, size_t bytes) {
    for (ssize_t n; bytes > 0; to += n, bytes -= (size_t)n)
        if ((n = recv(sock, to, bytes, 0)) <= 0) fail("the router closed the connection");
}

int main(int argc, char **argv) {
    if (argc < 5) fail("usage: client HOST PORT MAX_TOKENS ID [ID ...]");
    uint32_t count = (uint32_t)argc - 4, max_tokens = (uint32_t)strtoul(argv[3], NULL, 10);
    if (max_tokens < 1) fail("MAX_TOKENS is at least 1");
    uint8_t *request = malloc(48 + 4 * (size_t)count), *end = request;
    if (!request) fail("out of memory");
    /* PREFILL_REQUEST: tag, length, request_id 1, seq_len, rank unassigned, the ids. */
    end = put(put(end, PREFILL_REQUEST, 4), 16 + 4 * count, 4);
    end = put(put(put(end, 1, 8), count, 4), 0xFFFFFFFFu, 4);
    for (uint32_t i = 0; i < count; i++) end = put(end, strtoul(argv[4 + i], NULL, 10), 4);
    /* DECODE_REQUEST, right behind it: the first token comes with PREFILL_DONE. */
    end = put(put(end, DECODE_REQUEST, 4), 16, 4);
    end = put(put(put(end, 1, 8), max_tokens - 1, 4), 0, 4);

    int sock = connect_to(argv[1], argv[2]);
    for (const uint8_t *at = request; at < end;) {
        ssize_t sent = send(sock, at, (size_t)(end - at), MSG_NOSIGNAL);
        if (sent <= 0) fail("the router closed the connection");
        at += sent;
    }
    for (;;) {
        uint8_t frame[8 + 16 + 8];
        receive(sock, frame, 8 + 16);
        uint64_t tag = get(frame, 4), rest = get(frame + 4, 4) - 16;
        if (rest > 1 << 20) fail("the router sent no frame");
        if (tag == PREFILL_DONE) { /* the first token stands in front of the map; -1: none */
            if (rest < 8) fail("the router sent no frame");
            receive(sock, frame + 24, 8);
            rest -= 8;
        }
        for (uint8_t skipped[256]; rest > 0;) { /* msgpack maps: not needed here */
            size_t some = rest < sizeof skipped ? rest : sizeof skipped;
            receive(sock, skipped, some);
            rest -= some;
        }
        int64_t token = (int64_t)get(frame + (tag == PREFILL_DONE ? 24 : 16), 8);
        if (tag == DECODE_DONE) return 0;
        if (tag == ERROR) {
            fprintf(stderr, "error %u\n", (unsigned)get(frame + 16, 4));
            return 1;
        }
        if (tag != PREFILL_DONE && tag != DECODE_TOKEN) fail("unexpected frame");
        if (token >= 0) printf("%lld\n", (long long)token);
        fflush(stdout);
    }
}
