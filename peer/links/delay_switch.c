/* An Ethernet switch in user space that makes links long, thin and lossy, for kernels that have no netem.
 *
 * Every port is a TAP device in a network namespace. A frame that is read from one waits for the latency of its link,
 * then for its turn on the receiver's download, and is written to the receiver's TAP. The upload is limited by tbf on
 * the TAP itself: there TCP feels the back-pressure of a full queue, which it would not from here. Frames travel with
 * the header of virtio, so that a segment of TSO crosses in one read and one write.
 *
 * It is told what to do on standard input, a line each, and runs until that is closed:
 *
 *   port INDEX NETNS INTERFACE DOWN_BITS_PER_S QUEUE_BYTES     (0 bit/s: as fast as it goes)
 *   link FROM TO LATENCY_NS LOSS_PPM
 *   seed NUMBER                                                of the losses
 *   go
 *
 * After `go` it says "ready" on standard output, and at the end, for each port,
 *
 *   port INDEX frames N bytes N dropped N lost N               what it received; full queues; losses on purpose
 *
 * Frames find their way by the last two bytes of their address, which are the index of the port; groups go to all.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PORTS = 128, MAX_FRAME = 66000, HEADER = sizeof(struct virtio_net_hdr), BATCH = 32 };

struct frame {
    int references;
    int length;      /* with the header of virtio */
    int wire_bytes;  /* of all its segments, with Ethernet headers, as tbf counts them */
    unsigned char bytes[];
};

struct port {
    int fd;
    int64_t down_bits, queue_bytes, free_at;
    int64_t frames, num_bytes, dropped, lost;
};

struct link {
    int64_t latency_ns, loss_ppm;
};

/* What happens to a frame next: it has crossed its link, or it has had its turn on the download. */
struct event {
    int64_t at, number;
    struct frame *frame;
    int port, arrived;
};

static struct port ports[MAX_PORTS];
static struct link links[MAX_PORTS][MAX_PORTS];
static int num_ports;
static struct event *heap;
static int64_t heap_size, heap_room, events;
static uint64_t random_state = 1;

static void fail(const char *what) {
    fprintf(stderr, "delay_switch: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t serial_ns(int64_t num_bytes, int64_t bits_per_s) {
    return bits_per_s ? num_bytes * 8 * 1000000000LL / bits_per_s : 0;
}

/* splitmix64 */
static uint64_t draw(void) {
    uint64_t z = (random_state += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

static int before(const struct event *a, const struct event *b) {
    return a->at < b->at || (a->at == b->at && a->number < b->number);
}

static void push(int64_t at, int port, int arrived, struct frame *frame) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap) fail("memory");
    }
    struct event event = {at, events++, frame, port, arrived};
    int64_t i = heap_size++;
    while (i && before(&event, &heap[(i - 1) / 2])) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = event;
}

static struct event pop(void) {
    struct event first = heap[0], last = heap[--heap_size];
    int64_t i = 0, child;
    while ((child = 2 * i + 1) < heap_size) {
        if (child + 1 < heap_size && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return first;
}

static void release(struct frame *frame) {
    if (--frame->references == 0) free(frame);
}

/* Opens the TAP of a port inside its namespace; the device is gone when this process ends. */
static int open_tap(const char *netns, const char *name) {
    static int home = -1;
    if (home < 0 && (home = open("/proc/self/ns/net", O_RDONLY)) < 0) fail("own namespace");
    int there = open(netns, O_RDONLY);
    if (there < 0 || setns(there, CLONE_NEWNET)) fail(netns);
    close(there);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (fd < 0) fail("/dev/net/tun");
    struct ifreq request = {0};
    snprintf(request.ifr_name, IFNAMSIZ, "%.15s", name);
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(fd, TUNSETIFF, &request)) fail(name);
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) fail("offload");
    if (setns(home, CLONE_NEWNET)) fail("own namespace");
    return fd;
}

static int wire_bytes(const unsigned char *bytes, int length) {
    const struct virtio_net_hdr *header = (const void *)bytes;
    int frame = length - HEADER;
    if (header->gso_type == VIRTIO_NET_HDR_GSO_NONE || !header->gso_size || frame <= header->hdr_len) return frame;
    int segments = (frame - header->hdr_len + header->gso_size - 1) / header->gso_size;
    return frame + (segments - 1) * header->hdr_len;
}

static void send_over_link(int from, int to, struct frame *frame, int64_t now) {
    struct link *link = &links[from][to];
    if (link->loss_ppm && (int64_t)(draw() % 1000000) < link->loss_ppm) {
        ports[to].lost++;
        return;
    }
    frame->references++;
    push(now + link->latency_ns, to, 1, frame);
}

static void receive_from(int from) {
    static unsigned char bytes[MAX_FRAME];
    for (int count = 0; count < BATCH; count++) {
        ssize_t length = read(ports[from].fd, bytes, sizeof bytes);
        if (length < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (length < 0) fail("read");
        if (length < HEADER + 14) continue;
        int64_t now = now_ns();
        struct frame *frame = malloc(sizeof *frame + length);
        if (!frame) fail("memory");
        frame->references = 1;
        frame->length = length;
        frame->wire_bytes = wire_bytes(bytes, length);
        memcpy(frame->bytes, bytes, length);
        const unsigned char *to = frame->bytes + HEADER;
        if (to[0] & 1) {
            for (int port = 0; port < num_ports; port++)
                if (port != from) send_over_link(from, port, frame, now);
        } else {
            int port = to[4] << 8 | to[5];
            if (port < num_ports) send_over_link(from, port, frame, now);
        }
        release(frame);
    }
}

static void happen(struct event event) {
    struct port *port = &ports[event.port];
    struct frame *frame = event.frame;
    if (event.arrived && port->down_bits) {
        int64_t starts = port->free_at > event.at ? port->free_at : event.at;
        if (starts - event.at > serial_ns(port->queue_bytes, port->down_bits)) {
            port->dropped++;
            release(frame);
            return;
        }
        port->free_at = starts + serial_ns(frame->wire_bytes, port->down_bits);
        push(port->free_at, event.port, 0, frame);
        return;
    }
    if (write(port->fd, frame->bytes, frame->length) == frame->length) {
        port->frames++;
        port->num_bytes += frame->wire_bytes;
    } else {
        port->dropped++;
    }
    release(frame);
}

static void read_plan(void) {
    char line[512], netns[256], name[64];
    while (fgets(line, sizeof line, stdin)) {
        int index, from, to;
        struct port port = {0};
        struct link link = {0};
        unsigned long long seed;
        if (sscanf(line, "port %d %255s %63s %ld %ld", &index, netns, name, &port.down_bits, &port.queue_bytes) == 5
            && index == num_ports && index < MAX_PORTS) {
            port.fd = open_tap(netns, name);
            ports[num_ports++] = port;
        } else if (sscanf(line, "link %d %d %ld %ld", &from, &to, &link.latency_ns, &link.loss_ppm) == 4
                   && from >= 0 && from < MAX_PORTS && to >= 0 && to < MAX_PORTS) {
            links[from][to] = link;
        } else if (sscanf(line, "seed %llu", &seed) == 1) {
            random_state = seed;
        } else if (!strcmp(line, "go\n")) {
            return;
        } else {
            fprintf(stderr, "delay_switch: cannot read %s", line);
            exit(2);
        }
    }
    exit(0);
}

static volatile sig_atomic_t ended;

static void on_signal(int number) {
    (void)number;
    ended = 1;
}

int main(void) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    setvbuf(stdin, NULL, _IONBF, 0);
    /* Before the trainers that share the processor: what it does late would look like latency. */
    struct sched_param priority = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_RR, &priority);
    read_plan();
    int poll = epoll_create1(0), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event wanted = {.events = EPOLLIN, .data.fd = MAX_PORTS};
    if (poll < 0 || timer < 0 || epoll_ctl(poll, EPOLL_CTL_ADD, timer, &wanted)) fail("epoll");
    wanted.data.fd = MAX_PORTS + 1;
    if (epoll_ctl(poll, EPOLL_CTL_ADD, 0, &wanted)) fail("epoll on standard input");
    for (int port = 0; port < num_ports; port++) {
        wanted.data.fd = port;
        if (epoll_ctl(poll, EPOLL_CTL_ADD, ports[port].fd, &wanted)) fail("epoll on a TAP");
    }
    puts("ready");
    fflush(stdout);
    int64_t armed = 0;
    while (!ended) {
        struct epoll_event ready[MAX_PORTS];
        int count = epoll_wait(poll, ready, MAX_PORTS, -1);
        if (count < 0 && errno != EINTR) fail("epoll");
        for (int i = 0; i < count; i++) {
            int source = ready[i].data.fd;
            uint64_t ignored;
            char byte;
            if (source < MAX_PORTS) receive_from(source);
            else if (source == MAX_PORTS && read(timer, &ignored, sizeof ignored) > 0) armed = 0;
            else if (source == MAX_PORTS + 1 && read(0, &byte, 1) <= 0) ended = 1;
        }
        int64_t now = now_ns();
        while (heap_size && heap[0].at <= now) happen(pop());
        if (heap_size && heap[0].at != armed) {
            armed = heap[0].at;
            struct itimerspec at = {.it_value = {armed / 1000000000LL, armed % 1000000000LL}};
            timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
        }
    }
    for (int port = 0; port < num_ports; port++)
        printf("port %d frames %ld bytes %ld dropped %ld lost %ld\n", port, ports[port].frames, ports[port].num_bytes,
               ports[port].dropped, ports[port].lost);
    return 0;
}
