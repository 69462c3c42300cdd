/* The programs that translate a Service's address when a local client connects: see ../README.md.
 *
 * Whatever is not certain is left to nft, by returning with the address as it was. No path refuses a connection. */
#include "kernel.h"

enum { TCP = 6, UDP = 17 };
enum { ESTABLISHED = 1 }; /* state of a connected socket, of UDP, too */

/* An address in 16 bytes; IPv4 as ::ffff:a.b.c.d. */
struct address {
	__u32 word[4];
};

/* A frontend: port in network byte order; node with an address of zero for node ports. */
struct front_key {
	struct address addr;
	__u16 port;
	__u8 protocol;
	__u8 node;
};

/* Where a frontend leads: to one of count slots of a list, [1] for clients inside if split. */
struct front {
	__u32 list[2];
	__u32 count[2];
	__u8 split;
	__u8 masquerade; /* dataplane.Masquerading */
	__u16 unused;
};

enum { MASQUERADE_NONE, MASQUERADE_ALWAYS, MASQUERADE_OUTSIDE };

struct endpoint {
	struct address addr;
	__u16 port;
	__u16 unused;
};

/* How many slots of a family a block has: powers of two. */
enum { IN_BLOCK4 = 16, IN_BLOCK6 = 4 };

struct slot_key {
	__u32 list;
	__u32 block;
};

/* Some slots of a list: each entry of a map takes 56 bytes besides its key and value. Of IPv4 an address is one word, of
 * IPv6 it is four. A port of 0 means that the slot is empty. With its key and what an entry takes it fits into the 192 bytes
 * that the kernel allocates for it (Linux 6.1). */
struct block {
	__u32 word[16];
	__u16 port[IN_BLOCK4];
	__u32 six;
};

/* An endpoint's own address, in a list. */
struct own_key {
	__u32 list;
	struct address addr;
};

/* An endpoint that may keep the sockets that a list has sent to it: of UDP. */
struct member_key {
	__u32 list;
	struct endpoint at;
};

/* A network namespace other than the node's. */
struct client {
	__u8 state;
	__u8 flags[2]; /* of IPv4 and IPv6 */
	__u8 unused;
	struct address addr[2];
};

enum { CLIENT_ASKED, CLIENT_POD, CLIENT_OTHER };
enum { IN_PODS = 1, IN_LOCAL_PODS = 2 };

/* The question what namespace a thread has. */
struct ask {
	__u64 cookie;
	__u32 thread;
	__u32 unused;
};

/* What a translated socket's program believes to be connected with, and what it is connected with. */
struct peer {
	struct address addr;
	__u16 port;
	__u16 unused;
	struct endpoint to;
};

/* A translated socket that is connected: the agent ends it, of UDP, or leads its attempt on, of TCP, when its endpoint
 * leaves. */
struct connected {
	__u64 cookie; /* of its network namespace */
	struct front_key front;
	struct endpoint to;
};

/* Where the datagrams go that a socket sends to a frontend, for as long as it is open. */
struct sent {
	struct front_key front;
	struct endpoint to;
	__u32 list;
	__u32 state;
};

enum { SENT_NOTHING, SENT_TRANSLATED, SENT_LEFT };

/* How many frontends of one socket are translated; more are nft's. */
#define SENT_MOST 4

struct sends {
	struct sent to[SENT_MOST];
};

/* The cookie of the node's network namespace, written before the programs are loaded. */
volatile const __u64 node_namespace = 0;

/* Whether the agent can end sockets, written as well. Where it cannot, connected sockets of UDP are nft's. */
volatile const __u32 ends_sockets = 0;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 17);
	__type(key, struct front_key);
	__type(value, struct front);
} fronts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 18);
	__type(key, struct slot_key);
	__type(value, struct block);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct own_key);
	__type(value, __u8);
} own SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 18);
	__type(key, struct member_key);
	__type(value, __u8);
} members SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 10);
	__type(key, struct address);
	__type(value, __u8);
} nodes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, __u64);
	__type(value, struct client);
} clients SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 14);
} asks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct peer);
} peers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct sends);
} sends SEC(".maps");

/* Translated sockets of TCP, by the cookie of the socket, which takes its entry away when it is closed:
 * a tenth of the time that storage of the socket takes. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 17);
	__type(key, __u64);
	__type(value, struct connected);
} streams SEC(".maps");

/* By the cookie of the socket, which takes its entry away when it is closed. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, __u64);
	__type(value, struct connected);
} sockets SEC(".maps");

INLINE __u32 swap32(__u32 v) { return __builtin_bswap32(v); }

INLINE int is4(const struct address *a) { return !a->word[0] && !a->word[1] && a->word[2] == swap32(0xffff); }

INLINE int is_loopback(const struct address *a)
{
	if (is4(a))
		return (a->word[3] & swap32(0xff000000)) == swap32(0x7f000000);
	return !a->word[0] && !a->word[1] && !a->word[2] && a->word[3] == swap32(1);
}

INLINE struct front *find(const struct front_key *k)
{
	struct front *f = bpf_map_lookup_elem(&fronts, k);
	if (f || !bpf_map_lookup_elem(&nodes, &k->addr))
		return f;
	struct front_key node = {.port = k->port, .protocol = k->protocol, .node = 1};
	/* The family of a node port. */
	node.addr.word[2] = is4(&k->addr) ? swap32(0xffff) : 0;
	return bpf_map_lookup_elem(&fronts, &node);
}

/* ask tells the agent of a namespace that is not known, once. */
INLINE void ask(__u64 cookie)
{
	struct client c = {.state = CLIENT_ASKED};
	if (bpf_map_update_elem(&clients, &cookie, &c, BPF_NOEXIST))
		return;
	struct ask a = {.cookie = cookie, .thread = bpf_get_current_pid_tgid()};
	if (bpf_ringbuf_output(&asks, &a, sizeof(a), 0))
		bpf_map_delete_elem(&clients, &cookie);
}

/* What list_for and choose return in place of a list: the client is nft's, because it would be masqueraded, or is until
 * it is known. */
enum { LEFT = -1, UNKNOWN = -2 };

/* list_for returns which list of a frontend the client is sent to. */
INLINE int list_for(struct bpf_sock_addr *ctx, const struct front *f, const struct address *to, struct address *self)
{
	__u64 cookie = bpf_get_netns_cookie(ctx);
	if (cookie == node_namespace)
		return f->split;
	if (is_loopback(to))
		return LEFT;
	struct client *c = bpf_map_lookup_elem(&clients, &cookie);
	if (!c) {
		ask(cookie);
		return UNKNOWN;
	}
	if (c->state != CLIENT_POD)
		return c->state == CLIENT_ASKED ? UNKNOWN : LEFT;
	int six = !is4(to);
	__u8 flags = c->flags[six];
	*self = c->addr[six];
	if (f->split && flags & IN_LOCAL_PODS)
		return 1;
	if (f->masquerade == MASQUERADE_NONE || (f->masquerade == MASQUERADE_OUTSIDE && flags & IN_PODS))
		return 0;
	return LEFT;
}

/* slot_of finds the endpoint at a slot of a list, if the list is there. */
INLINE int slot_of(__u32 list, __u32 slot, int six, struct endpoint *to)
{
	struct slot_key k = {.list = list, .block = slot / (six ? IN_BLOCK6 : IN_BLOCK4)};
	struct block *b = bpf_map_lookup_elem(&slots, &k);
	if (!b)
		return 0;
	*to = (struct endpoint){};
	if (six) {
		slot &= IN_BLOCK6 - 1;
		for (int i = 0; i < 4; i++)
			to->addr.word[i] = b->word[4 * slot + i];
	} else {
		slot &= IN_BLOCK4 - 1;
		to->addr.word[2] = swap32(0xffff);
		to->addr.word[3] = b->word[slot];
	}
	to->port = b->port[slot];
	return to->port != 0;
}

/* choose finds the endpoint for a new connection, and returns the number of the list that has it, which is above 0. */
INLINE __s64 choose(struct bpf_sock_addr *ctx, const struct front_key *k, struct endpoint *to)
{
	/* Twice: the list that a frontend had may be gone when its slot is looked up. */
	for (int i = 0; i < 2; i++) {
		struct front *f = find(k);
		if (!f)
			return LEFT;
		struct own_key me = {};
		int list = list_for(ctx, f, &k->addr, &me.addr);
		if (list < 0)
			return list;
		me.list = list ? f->list[1] : f->list[0];
		__u32 count = list ? f->count[1] : f->count[0];
		if (!count)
			return LEFT;
		/* An endpoint that may be sent to itself is masqueraded then. */
		if ((me.addr.word[0] || me.addr.word[2]) && bpf_map_lookup_elem(&own, &me))
			return LEFT;
		__u32 slot = ((__u64)bpf_get_prandom_u32() * count) >> 32;
		if (slot_of(me.list, slot, !is4(&k->addr), to))
			return me.list;
	}
	return LEFT;
}

/* bound is whether a socket has a source address or an interface: routes and masquerading may depend on that. */
INLINE int bound(struct bpf_sock_addr *ctx, int six)
{
	struct bpf_sock *sk = ctx->sk;
	if (!sk || sk->bound_dev_if)
		return 1;
	if (!six)
		return sk->src_ip4 != 0;
	return sk->src_ip6[0] || sk->src_ip6[1] || sk->src_ip6[2] || sk->src_ip6[3];
}

INLINE int same_address(const struct address *a, const struct address *b)
{
	return a->word[0] == b->word[0] && a->word[1] == b->word[1] && a->word[2] == b->word[2] && a->word[3] == b->word[3];
}

INLINE int leads_to(const struct sent *e, const struct address *addr, __u16 port)
{
	return e->state == SENT_TRANSLATED && e->to.port == port && same_address(&e->to.addr, addr);
}

/* keeps reports whether a socket may go on sending to the endpoint that it was sent to: whether that serves still. */
INLINE int keeps(const struct front *f, struct sent *e)
{
	for (int i = 0; i < 2; i++) {
		struct member_key m = {.list = f->list[i], .at = e->to};
		if (m.list && (m.list == e->list || bpf_map_lookup_elem(&members, &m))) {
			e->list = m.list;
			return 1;
		}
	}
	return 0;
}

/* entry returns the one of the frontend, or a free one, if there is. s may be 0. */
INLINE struct sent *entry(struct sends *s, const struct front_key *k)
{
	struct sent *e = 0;
	for (int i = 0; s && i < SENT_MOST; i++) {
		struct sent *x = &s->to[i];
		if (x->state == SENT_NOTHING ? !e : x->front.port == k->port && same_address(&x->front.addr, &k->addr))
			e = x;
	}
	return e;
}

/* send_to finds where a datagram to k goes. What was decided for the first one of a socket
 * stays, as connection tracking has it: a socket that was left to nft would otherwise change its endpoint. The kernel
 * holds the socket's lock. */
INLINE int send_to(struct bpf_sock_addr *ctx, struct front_key *k, struct endpoint *to)
{
	if (k->protocol != UDP || !ctx->sk)
		return 0;
	struct sends *s = bpf_sk_storage_get(&sends, ctx->sk, 0, 0);
	struct front *f = find(k);
	if (!f) {
		/* A direct datagram to an endpoint: answers to it must show the endpoint's own address. */
		for (int i = 0; s && i < SENT_MOST; i++)
			if (leads_to(&s->to[i], &k->addr, k->port))
				s->to[i].state = SENT_LEFT;
		return 0;
	}
	struct sent *e = entry(s, k);
	if ((s && !e) || (e && e->state == SENT_LEFT))
		return 0;
	if (e && e->state == SENT_TRANSLATED && keeps(f, e)) {
		*to = e->to;
		return 1;
	}
	__s64 list = choose(ctx, k, to);
	if (list == LEFT)
		return 0;
	if (!s) {
		s = bpf_sk_storage_get(&sends, ctx->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
		if (!s)
			return 0;
		e = &s->to[0];
	}
	if (!e)
		return 0;
	e->front = *k;
	e->state = SENT_LEFT;
	if (list == UNKNOWN)
		return 0;
	/* Answers of one endpoint to datagrams to two frontends could not be told apart. */
	for (int i = 0; i < SENT_MOST; i++)
		if (leads_to(&s->to[i], &to->addr, to->port))
			return 0;
	e->to = *to;
	e->list = list;
	e->state = SENT_TRANSLATED;
	return 1;
}

/* leave remembers that a datagram to a frontend was nft's: its flow is tracked there, and later datagrams of the socket must not
 * change its endpoint. */
INLINE void leave(struct bpf_sock_addr *ctx, const struct front_key *k)
{
	if (k->protocol != UDP || !ctx->sk || !find(k))
		return;
	struct sends *s = bpf_sk_storage_get(&sends, ctx->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	struct sent *e = entry(s, k);
	if (!e || e->state != SENT_NOTHING)
		return;
	e->front = *k;
	e->state = SENT_LEFT;
}

/* note tells the agent of a connected socket, in the map of its protocol, and reports whether there was room. */
INLINE int note(struct bpf_sock_addr *ctx, void *map, const struct front_key *k, const struct endpoint *to)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct connected c = {.cookie = bpf_get_netns_cookie(ctx), .front = *k, .to = *to};
	return !bpf_map_update_elem(map, &cookie, &c, 0);
}

/* forget is for a socket that is connected with something else now. */
INLINE void forget(struct bpf_sock_addr *ctx, __u8 protocol)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	if (!bpf_sk_storage_delete(&peers, ctx->sk) && protocol == UDP)
		bpf_map_delete_elem(&sockets, &cookie);
	if (protocol == TCP)
		bpf_map_delete_elem(&streams, &cookie);
}

/* The root of the control groups, where the kernel's own threads are (Linux 5.5 and later give it this number). */
enum { ROOT_GROUP = 1 };

/* remember_stream keeps what getpeername and the agent need of a socket of TCP, and reports whether there was room. The
 * kernel's own sockets, such as NFS's, are released without a program. */
INLINE int remember_stream(struct bpf_sock_addr *ctx, const struct front_key *k, const struct endpoint *to)
{
	if (k->protocol != TCP)
		return 0;
	if (bpf_get_current_cgroup_id() == ROOT_GROUP) {
		__u64 cookie = bpf_get_socket_cookie(ctx);
		bpf_map_delete_elem(&streams, &cookie); /* of an earlier connection of the socket */
		return 0;
	}
	return note(ctx, &streams, k, to);
}

/* translate finds where a connection to k goes, and remembers k for getpeername. */
INLINE int translate(struct bpf_sock_addr *ctx, struct front_key *k, struct endpoint *to, int six)
{
	if (!ctx->sk)
		return 0;
	int found = 0;
	if (!bound(ctx, six)) {
		if (k->protocol == TCP)
			found = choose(ctx, k, to) > 0;
		else if (ends_sockets)
			found = send_to(ctx, k, to); /* as the socket's datagrams before it was connected */
	}
	if (!found) {
		forget(ctx, k->protocol);
		return 0;
	}
	if (remember_stream(ctx, k, to))
		return 1;
	struct peer *p = bpf_sk_storage_get(&peers, ctx->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!p)
		return 0;
	if (k->protocol == UDP && !note(ctx, &sockets, k, to)) {
		forget(ctx, k->protocol);
		return 0;
	}
	p->addr = k->addr;
	p->port = k->port;
	p->to = *to;
	return 1;
}

/* peer_of returns the peer of a translated socket while it is connected. */
INLINE struct peer *peer_of(struct bpf_sock_addr *ctx)
{
	if (!ctx->sk || ctx->sk->state != ESTABLISHED)
		return 0;
	return bpf_sk_storage_get(&peers, ctx->sk, 0, 0);
}

/* sends_to is send_to for all sockets: a connected one may name its peer nevertheless. bound is whether the datagram has a
 * source address. */
INLINE int sends_to(struct bpf_sock_addr *ctx, struct front_key *k, struct endpoint *to, int bound)
{
	struct bpf_sock *sk = ctx->sk;
	if (!sk || sk->bound_dev_if)
		return 0;
	if (sk->state == ESTABLISHED) {
		struct peer *p = peer_of(ctx);
		if (!p || p->port != k->port || !same_address(&p->addr, &k->addr))
			return 0;
		*to = p->to;
		return 1;
	}
	if (bound) {
		leave(ctx, k);
		return 0;
	}
	return send_to(ctx, k, to);
}

/* received finds the frontend that a datagram's sender is shown as. */
INLINE int received(struct bpf_sock_addr *ctx, struct front_key *from)
{
	if (ctx->protocol != UDP || !ctx->sk)
		return 0;
	struct peer *p = peer_of(ctx);
	if (p && p->to.port == from->port && same_address(&p->to.addr, &from->addr)) {
		from->addr = p->addr;
		from->port = p->port;
		return 1;
	}
	struct sends *s = bpf_sk_storage_get(&sends, ctx->sk, 0, 0);
	for (int i = 0; s && i < SENT_MOST; i++)
		if (leads_to(&s->to[i], &from->addr, from->port)) {
			*from = s->to[i].front;
			return 1;
		}
	return 0;
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	struct front_key k = {.port = ctx->user_port, .protocol = ctx->protocol};
	struct endpoint to;
	k.addr.word[2] = swap32(0xffff);
	k.addr.word[3] = ctx->user_ip4;
	if (sends_to(ctx, &k, &to, ctx->msg_src_ip4 != 0)) {
		ctx->user_ip4 = to.addr.word[3];
		ctx->user_port = to.port;
	}
	return 1;
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	struct front_key k = {.port = ctx->user_port, .protocol = ctx->protocol};
	struct endpoint to;
	k.addr.word[0] = ctx->user_ip6[0];
	k.addr.word[1] = ctx->user_ip6[1];
	k.addr.word[2] = ctx->user_ip6[2];
	k.addr.word[3] = ctx->user_ip6[3];
	int bound = ctx->msg_src_ip6[0] || ctx->msg_src_ip6[1] || ctx->msg_src_ip6[2] || ctx->msg_src_ip6[3];
	if (sends_to(ctx, &k, &to, bound)) {
		ctx->user_ip6[0] = to.addr.word[0];
		ctx->user_ip6[1] = to.addr.word[1];
		ctx->user_ip6[2] = to.addr.word[2];
		ctx->user_ip6[3] = to.addr.word[3];
		ctx->user_port = to.port;
	}
	return 1;
}

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	struct front_key k = {.addr.word = {0, 0, swap32(0xffff), ctx->user_ip4}, .port = ctx->user_port};
	if (received(ctx, &k)) {
		ctx->user_ip4 = k.addr.word[3];
		ctx->user_port = k.port;
	}
	return 1;
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	struct front_key k = {.port = ctx->user_port};
	k.addr.word[0] = ctx->user_ip6[0];
	k.addr.word[1] = ctx->user_ip6[1];
	k.addr.word[2] = ctx->user_ip6[2];
	k.addr.word[3] = ctx->user_ip6[3];
	if (received(ctx, &k)) {
		ctx->user_ip6[0] = k.addr.word[0];
		ctx->user_ip6[1] = k.addr.word[1];
		ctx->user_ip6[2] = k.addr.word[2];
		ctx->user_ip6[3] = k.addr.word[3];
		ctx->user_port = k.port;
	}
	return 1;
}

/* Of every socket that is closed. */
SEC("cgroup/sock_release")
int released(struct bpf_sock *sk)
{
	__u64 cookie = bpf_get_socket_cookie(sk);
	if (sk->protocol == UDP)
		bpf_map_delete_elem(&sockets, &cookie);
	if (sk->protocol == TCP)
		bpf_map_delete_elem(&streams, &cookie);
	return 1;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct front_key k = {.port = ctx->user_port, .protocol = ctx->protocol};
	struct endpoint to = {};
	k.addr.word[2] = swap32(0xffff);
	k.addr.word[3] = ctx->user_ip4;
	if (translate(ctx, &k, &to, 0)) {
		ctx->user_ip4 = to.addr.word[3];
		ctx->user_port = to.port;
	}
	return 1;
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct front_key k = {.port = ctx->user_port, .protocol = ctx->protocol};
	struct endpoint to = {};
	k.addr.word[0] = ctx->user_ip6[0];
	k.addr.word[1] = ctx->user_ip6[1];
	k.addr.word[2] = ctx->user_ip6[2];
	k.addr.word[3] = ctx->user_ip6[3];
	if (translate(ctx, &k, &to, 1)) {
		ctx->user_ip6[0] = to.addr.word[0];
		ctx->user_ip6[1] = to.addr.word[1];
		ctx->user_ip6[2] = to.addr.word[2];
		ctx->user_ip6[3] = to.addr.word[3];
		ctx->user_port = to.port;
	}
	return 1;
}

/* shown finds the frontend that the peer of a socket is shown as. */
INLINE int shown(struct bpf_sock_addr *ctx, struct front_key *as)
{
	if (!ctx->sk)
		return 0;
	if (ctx->protocol == TCP) {
		__u64 cookie = bpf_get_socket_cookie(ctx);
		struct connected *c = bpf_map_lookup_elem(&streams, &cookie);
		if (c) {
			*as = c->front;
			return 1;
		}
	}
	struct peer *p = bpf_sk_storage_get(&peers, ctx->sk, 0, 0);
	if (!p)
		return 0;
	as->addr = p->addr;
	as->port = p->port;
	return 1;
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	struct front_key k = {};
	if (shown(ctx, &k)) {
		ctx->user_ip4 = k.addr.word[3];
		ctx->user_port = k.port;
	}
	return 1;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	struct front_key k = {};
	if (shown(ctx, &k)) {
		ctx->user_ip6[0] = k.addr.word[0];
		ctx->user_ip6[1] = k.addr.word[1];
		ctx->user_ip6[2] = k.addr.word[2];
		ctx->user_ip6[3] = k.addr.word[3];
		ctx->user_port = k.port;
	}
	return 1;
}

char licence[] SEC("license") = "Apache-2.0";
