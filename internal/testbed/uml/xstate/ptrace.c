// Preloaded into linux.uml: PTRACE_SETREGSET with the whole extended state.
//
// The host's kernel takes NT_X86_XSTATE only in full (EFAULT otherwise), and User
// Mode Linux before 6.13 knows the first 2,696 bytes of it, up to PKRU. On CPUs with
// AMX it is longer. What is behind those bytes stays as it is: programs in the
// guest have no use for it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

static long (*real)(enum __ptrace_request, pid_t, void *, void *);

// Static, for it is called on the stacks of a kernel. That kernel has one CPU and
// does not preempt, so no two calls overlap.
static char state[64 << 10] __attribute__((aligned(64)));

__attribute__((constructor)) static void find(void)
{
	real = dlsym(RTLD_NEXT, "ptrace");
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list args;
	va_start(args, request);
	pid_t pid = va_arg(args, pid_t);
	void *addr = va_arg(args, void *);
	void *data = va_arg(args, void *);
	va_end(args);

	if (request == PTRACE_SETREGSET && addr == (void *)NT_X86_XSTATE) {
		struct iovec *part = data, whole = {state, sizeof(state)};
		if (real(PTRACE_GETREGSET, pid, addr, &whole) == 0 && whole.iov_len > part->iov_len) {
			memcpy(state, part->iov_base, part->iov_len);
			return real(PTRACE_SETREGSET, pid, addr, &whole);
		}
	}
	return real(request, pid, addr, data);
}
