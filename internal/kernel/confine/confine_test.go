package confine_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/confine"
	"github.com/fairlead/fairlead/internal/testbed"
)

const (
	specEnv = "CONFINE_TEST_SPEC" // this program confines itself so, and becomes a look-out
	lookEnv = "CONFINE_TEST_LOOK" // a look-out says what it is and may
)

func TestMain(m *testing.M) {
	if text := os.Getenv(specEnv); text != "" {
		var s confine.Spec
		err := json.Unmarshal([]byte(text), &s)
		if err == nil {
			err = confine.Exec(s, "/proc/self/exe", []string{"look"}, []string{lookEnv + "=1"})
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if os.Getenv(lookEnv) != "" {
		out := map[string]string{}
		b, _ := os.ReadFile("/proc/self/status")
		for line := range strings.Lines(string(b)) {
			k, v, _ := strings.Cut(line, ":")
			out[k] = strings.Join(strings.Fields(v), " ")
		}
		for _, c := range slices.Concat(deniedCalls, allowedCalls, unknownCalls) {
			_, _, e := unix.Syscall6(c.nr, c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], c.args[5])
			out["call "+c.name] = e.Error()
		}
		_ = json.NewEncoder(os.Stdout).Encode(out)
		return
	}
	testbed.Main(m)
}

// confined runs a process behind s that makes all calls, and returns what it printed.
func confined(t *testing.T, s confine.Spec) map[string]string {
	t.Helper()
	spec, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), specEnv+"="+string(spec))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	b, err := cmd.Output()
	out := map[string]string{}
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		t.Fatalf("%v: %s%s", err, b, stderr.Bytes())
	}
	return out
}

// call is a system call whose arguments make it do nothing: root gets another error than
// EPERM, unless the filter answers.
type call struct {
	name string
	nr   uintptr
	args [6]uintptr
}

const bad = ^uintptr(0) // no descriptor, no address, no flags

var deniedCalls = []call{
	{"add_key", unix.SYS_ADD_KEY, [6]uintptr{bad, bad}},
	{"keyctl", unix.SYS_KEYCTL, [6]uintptr{bad}},
	{"request_key", unix.SYS_REQUEST_KEY, [6]uintptr{bad, bad}},
	{"userfaultfd", unix.SYS_USERFAULTFD, [6]uintptr{bad}},
	{"move_pages", unix.SYS_MOVE_PAGES, [6]uintptr{0, 1, 0, 0, 0, bad}},
	{"io_uring_setup", unix.SYS_IO_URING_SETUP, [6]uintptr{0, bad}},
	{"io_uring_enter", unix.SYS_IO_URING_ENTER, [6]uintptr{bad}},
	{"io_uring_register", unix.SYS_IO_URING_REGISTER, [6]uintptr{bad}},
	{"mount", unix.SYS_MOUNT, [6]uintptr{bad, bad, bad}},
	{"umount2", unix.SYS_UMOUNT2, [6]uintptr{bad, bad}},
	{"pivot_root", unix.SYS_PIVOT_ROOT, [6]uintptr{bad, bad}},
	{"setns", unix.SYS_SETNS, [6]uintptr{bad}},
	{"unshare", unix.SYS_UNSHARE, [6]uintptr{unix.CLONE_NEWUSER | 0xff}},
	{"clone of a namespace", unix.SYS_CLONE, [6]uintptr{unix.CLONE_NEWUSER | unix.CLONE_FS}},
	{"quotactl", unix.SYS_QUOTACTL, [6]uintptr{bad, bad}},
	{"fsopen", unix.SYS_FSOPEN, [6]uintptr{bad, bad}},
	{"fsconfig", unix.SYS_FSCONFIG, [6]uintptr{bad}},
	{"fsmount", unix.SYS_FSMOUNT, [6]uintptr{bad, bad}},
	{"fspick", unix.SYS_FSPICK, [6]uintptr{bad, bad, bad}},
	{"open_tree", unix.SYS_OPEN_TREE, [6]uintptr{bad, bad, bad}},
	{"move_mount", unix.SYS_MOVE_MOUNT, [6]uintptr{bad, bad, bad, bad, bad}},
	{"mount_setattr", unix.SYS_MOUNT_SETATTR, [6]uintptr{bad, bad, bad}},
	{"swapon", unix.SYS_SWAPON, [6]uintptr{bad, bad}},
	{"swapoff", unix.SYS_SWAPOFF, [6]uintptr{bad}},
	{"fanotify_init", unix.SYS_FANOTIFY_INIT, [6]uintptr{bad, bad}},
	{"sethostname", unix.SYS_SETHOSTNAME, [6]uintptr{bad, bad}},
	{"setdomainname", unix.SYS_SETDOMAINNAME, [6]uintptr{bad, bad}},
	{"init_module", unix.SYS_INIT_MODULE, [6]uintptr{bad, 1 << 20, bad}},
	{"finit_module", unix.SYS_FINIT_MODULE, [6]uintptr{bad, bad, bad}},
	{"delete_module", unix.SYS_DELETE_MODULE, [6]uintptr{bad}},
	{"reboot", unix.SYS_REBOOT, [6]uintptr{1, 1, 1}},
	{"kexec_load", unix.SYS_KEXEC_LOAD, [6]uintptr{0, 0, 0, 1 << 20}},
	{"kexec_file_load", unix.SYS_KEXEC_FILE_LOAD, [6]uintptr{bad, bad, 0, 0, 1 << 20}},
	{"acct", unix.SYS_ACCT, [6]uintptr{bad}},
	{"settimeofday", unix.SYS_SETTIMEOFDAY, [6]uintptr{bad, bad}},
	{"clock_settime", unix.SYS_CLOCK_SETTIME, [6]uintptr{bad, bad}},
	{"clock_adjtime", unix.SYS_CLOCK_ADJTIME, [6]uintptr{bad, bad}},
	{"syslog", unix.SYS_SYSLOG, [6]uintptr{bad}},
	{"bpf", unix.SYS_BPF, [6]uintptr{bad, bad, bad}},
	{"perf_event_open", unix.SYS_PERF_EVENT_OPEN, [6]uintptr{bad}},
	{"kcmp", unix.SYS_KCMP, [6]uintptr{bad, bad, bad}},
	{"set_mempolicy", unix.SYS_SET_MEMPOLICY, [6]uintptr{bad}},
	{"mbind", unix.SYS_MBIND, [6]uintptr{0, 0, bad, 0, 0, bad}},
	{"migrate_pages", unix.SYS_MIGRATE_PAGES, [6]uintptr{0, bad}},
	{"open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, [6]uintptr{bad, bad}},
	{"chroot", unix.SYS_CHROOT, [6]uintptr{bad}},
	{"socket of the hypervisor", unix.SYS_SOCKET, [6]uintptr{unix.AF_VSOCK, bad}},
	{"another personality", unix.SYS_PERSONALITY, [6]uintptr{0x0040000}}, // ADDR_NO_RANDOMIZE
}

var allowedCalls = []call{
	{"getpid", unix.SYS_GETPID, [6]uintptr{}},
	{"clone", unix.SYS_CLONE, [6]uintptr{unix.CLONE_THREAD}},
	{"ptrace", unix.SYS_PTRACE, [6]uintptr{bad}},
	{"process_vm_readv", unix.SYS_PROCESS_VM_READV, [6]uintptr{0, 0, 0, 0, 0, bad}},
	{"socket", unix.SYS_SOCKET, [6]uintptr{unix.AF_INET, unix.SOCK_STREAM}},
	{"netlink socket", unix.SYS_SOCKET, [6]uintptr{unix.AF_NETLINK, unix.SOCK_RAW}},
	{"unix socket", unix.SYS_SOCKET, [6]uintptr{unix.AF_UNIX, unix.SOCK_STREAM}},
	{"personality", unix.SYS_PERSONALITY, [6]uintptr{0xffffffff}},
	{"memfd_create", unix.SYS_MEMFD_CREATE, [6]uintptr{bad, bad}},
	{"statx", unix.SYS_STATX, [6]uintptr{bad, bad}},
	{"name_to_handle_at", unix.SYS_NAME_TO_HANDLE_AT, [6]uintptr{bad, bad, bad, bad}},
	{"copy_file_range", unix.SYS_COPY_FILE_RANGE, [6]uintptr{bad, bad, bad, bad}},
	{"pidfd_open", unix.SYS_PIDFD_OPEN, [6]uintptr{bad, bad}},
	{"openat2", unix.SYS_OPENAT2, [6]uintptr{bad, bad, bad}},
	{"close_range", unix.SYS_CLOSE_RANGE, [6]uintptr{1000, 999}},
	{"faccessat2", unix.SYS_FACCESSAT2, [6]uintptr{bad, bad, bad, bad}},
	{"landlock_create_ruleset", unix.SYS_LANDLOCK_CREATE_RULESET, [6]uintptr{bad, bad, bad}},
	{"futex_waitv", unix.SYS_FUTEX_WAITV, [6]uintptr{bad, bad, bad}},
	{"cachestat", unix.SYS_CACHESTAT, [6]uintptr{bad, bad}},
	{"fchmodat2", unix.SYS_FCHMODAT2, [6]uintptr{bad, bad, bad, bad}},
	{"rseq", unix.SYS_RSEQ, [6]uintptr{bad, 1, bad}},
	{"mlock", unix.SYS_MLOCK, [6]uintptr{}},
	{"setpriority", unix.SYS_SETPRIORITY, [6]uintptr{bad}},
}

var unknownCalls = []call{
	{"clone3", unix.SYS_CLONE3, [6]uintptr{bad, 64}},
	{"a call of the future", 467, [6]uintptr{bad, bad, bad, bad, bad}},
	{"a number of x32", 0x40000000 + unix.SYS_GETPID, [6]uintptr{}},
}

// The filter answers EPERM to what the profile of the container runtimes denies, though
// the process has every capability and gets other errors without it; the rest is as
// without it. Capabilities that a container keeps allow their calls.
func TestFilter(t *testing.T) {
	plain := confined(t, confine.Spec{AllCapabilities: true})
	filtered := confined(t, confine.Spec{AllCapabilities: true, Seccomp: true})
	if plain["Seccomp"] != "0" || filtered["Seccomp"] != "2" {
		t.Fatalf("modes of seccomp: %s and %s", plain["Seccomp"], filtered["Seccomp"])
	}
	eperm, enosys := unix.EPERM.Error(), unix.ENOSYS.Error()
	for _, c := range deniedCalls {
		if is := plain["call "+c.name]; is == eperm {
			t.Errorf("%s: %q without a filter, so the test proves nothing", c.name, is)
		}
		if is := filtered["call "+c.name]; is != eperm {
			t.Errorf("%s: %q, want %q", c.name, is, eperm)
		}
	}
	for _, c := range allowedCalls {
		if is, want := filtered["call "+c.name], plain["call "+c.name]; is != want {
			t.Errorf("%s: %q, without a filter %q", c.name, is, want)
		}
	}
	for _, c := range unknownCalls {
		if is := filtered["call "+c.name]; is != enosys {
			t.Errorf("%s: %q, want %q", c.name, is, enosys)
		}
	}
	var bounding []int
	for _, name := range []string{"SYS_ADMIN", "BPF", "SYS_TIME"} {
		n, err := confine.Capability(name)
		if err != nil {
			t.Fatal(err)
		}
		bounding = append(bounding, n)
	}
	some := confined(t, confine.Spec{AllCapabilities: true, Bounding: bounding, Seccomp: true})
	for name, denied := range map[string]bool{
		"mount": false, "unshare": false, "setns": false, "clone of a namespace": false, "bpf": false, "settimeofday": false,
		"init_module": true, "keyctl": true, "reboot": true, "open_by_handle_at": true, "userfaultfd": true,
	} {
		if is := some["call "+name]; (is == eperm) != denied {
			t.Errorf("%s: %q with %v", name, is, bounding)
		}
	}
}
