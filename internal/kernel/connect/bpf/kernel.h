/* What connect.c needs of the kernel's interface, linux/bpf.h and the helpers' numbers: with nothing else included, the
 * object depends on the compiler only. */
#pragma once

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef long long __s64;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define __uint(name, value) int(*name)[value]
#define __type(name, value) value *name

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_SK_STORAGE = 24,
	BPF_MAP_TYPE_RINGBUF = 27,
};

enum { BPF_F_NO_PREALLOC = 1 };
enum { BPF_NOEXIST = 1 };
enum { BPF_SK_STORAGE_GET_F_CREATE = 1 };

struct bpf_sock {
	__u32 bound_dev_if;
	__u32 family;
	__u32 type;
	__u32 protocol;
	__u32 mark;
	__u32 priority;
	__u32 src_ip4;
	__u32 src_ip6[4];
	__u32 src_port;
	__u16 dst_port;
	__u16 unused;
	__u32 dst_ip4;
	__u32 dst_ip6[4];
	__u32 state;
};

struct bpf_sock_addr {
	__u32 user_family;
	__u32 user_ip4; /* these three in network byte order */
	__u32 user_ip6[4];
	__u32 user_port;
	__u32 family;
	__u32 type;
	__u32 protocol;
	__u32 msg_src_ip4;
	__u32 msg_src_ip6[4];
	struct bpf_sock *sk __attribute__((aligned(8)));
};

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*const bpf_map_update_elem)(void *map, const void *key, const void *value, __u64 flags) = (void *)2;
static long (*const bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static __u32 (*const bpf_get_prandom_u32)(void) = (void *)7;
static __u64 (*const bpf_get_current_pid_tgid)(void) = (void *)14;
static __u64 (*const bpf_get_socket_cookie)(void *ctx) = (void *)46;
static __u64 (*const bpf_get_current_cgroup_id)(void) = (void *)80;
static void *(*const bpf_sk_storage_get)(void *map, void *sk, void *value, __u64 flags) = (void *)107;
static long (*const bpf_sk_storage_delete)(void *map, void *sk) = (void *)108;
static __u64 (*const bpf_get_netns_cookie)(void *ctx) = (void *)122;
static long (*const bpf_ringbuf_output)(void *ring, void *data, __u64 size, __u64 flags) = (void *)130;
