package runner_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/testbed"
)

// tries are what a Pod must not be able to do unless it may be privileged.
var tries = map[string]func() error{
	"read the key":           func() error { return readable(os.Getenv("KEY")) },
	"read another Pod's":     func() error { return readable(os.Getenv("OTHER")) },
	"read the agent's":       func() error { return readable("/proc/" + os.Getenv("AGENT") + "/environ") },
	"see the agent":          func() error { return readable("/proc/" + os.Getenv("AGENT") + "/status") },
	"see the machine's /run": func() error { return readable("/run/of-the-machine") },
	"see the machine's /tmp": func() error { return readable(os.Getenv("TEMP")) },
	"write to /etc":          func() error { return writable("/etc/attacked") },
	"write to /srv":          func() error { return writable("/srv/attacked") },
	"write to /dev":          func() error { return writable("/dev/attacked") },
	"write a sysctl": func() error {
		b, err := os.ReadFile("/proc/sys/kernel/domainname")
		return errors.Join(err, os.WriteFile("/proc/sys/kernel/domainname", b, 0))
	},
	"signal the agent":  func() error { return syscall.Kill(agentPid(), 0) },
	"trace the agent":   func() error { return unix.PtraceSeize(agentPid()) },
	"mount":             func() error { return unix.Mount("tmpfs", "/srv", "tmpfs", 0, "size=4k") },
	"open a raw socket": func() error { return socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP) },
	"open a packet one": func() error { return socket(unix.AF_PACKET, unix.SOCK_RAW, 0) },
	"make a user":       func() error { return unix.Unshare(unix.CLONE_NEWNS) },
	"become root":       func() error { return unix.Setresuid(0, 0, 0) },
	"make a device": func() error {
		return errors.Join(unix.Mknod("/run/attacked", unix.S_IFBLK|0o600, 0x100), os.Remove("/run/attacked"))
	},
	"make a key":              addKey,
	"reach a socket":          func() error { return dial(os.Getenv("SOCKET")) },
	"signal the first":        func() error { return syscall.Kill(1, 0) },
	"read another's":          func() error { return readable("/proc/" + os.Getenv("OTHERPID") + "/environ") },
	"signal another":          func() error { return syscall.Kill(number("OTHERPID"), 0) },
	"write to another sysctl": func() error { return rewrite("/proc/sys/kernel/core_pattern") },
	"change the network":      setMTU,
	"change the hostname":     func() error { return unix.Sethostname([]byte("attacked")) },
}

func addKey() error {
	_, err := unix.AddKey("user", "attack", []byte("x"), unix.KEY_SPEC_PROCESS_KEYRING)
	return err
}

// more are further ones, of which a machine may deny some to its root, too.
var more = map[string]func() error{
	"make a control group": func() error {
		return errors.Join(os.Mkdir("/sys/fs/cgroup/attacked", 0o755), os.Remove("/sys/fs/cgroup/attacked"))
	},
	"leave the control group": func() error {
		return os.WriteFile("/sys/fs/cgroup/cgroup.procs", []byte(strconv.Itoa(os.Getpid())), 0)
	},
	"see the shim's root":      func() error { return readable("/proc/1/root/" + os.Getenv("KEY")) },
	"see its namespaces":       func() error { return second(os.Readlink("/proc/1/ns/net")) },
	"read its environment":     func() error { return readable("/proc/1/environ") },
	"read its memory":          func() error { return second(os.Open("/proc/1/mem")) },
	"see its directory":        func() error { return second(os.ReadDir("/proc/1/cwd/")) },
	"trace the first":          func() error { return unix.PtraceSeize(1) },
	"write to /sys":            func() error { return rewrite("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/profiling") },
	"reach an abstract socket": func() error { return dial("@attacked") },
	"read the session's keys":  func() error { return second(unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, true)) },
	"make a BPF map": func() error {
		attr := [5]uint32{unix.BPF_MAP_TYPE_ARRAY, 4, 4, 1, 0}
		fd, _, e := unix.Syscall(unix.SYS_BPF, unix.BPF_MAP_CREATE, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
		if e != 0 {
			return e
		}
		return unix.Close(int(fd))
	},
	"make a user namespace": func() error { return inNew(unix.CLONE_NEWUSER) },
	"make a PID namespace":  func() error { return inNew(unix.CLONE_NEWPID) },
	"outlive the others":    func() error { return os.WriteFile("/proc/self/oom_score_adj", []byte("-500"), 0) },
	"run before the others": func() error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -5) },
	"open more files": func() error {
		return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 30, Max: 1 << 30})
	},
	"read the kernel's log":  func() error { return second(unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, make([]byte, 100))) },
	"read it by the file":    func() error { return second(os.Open("/dev/kmsg")) },
	"read the memory":        func() error { return second(os.Open("/dev/mem")) },
	"see all memory":         func() error { return readable("/proc/kcore") },
	"press a key":            func() error { return os.WriteFile("/proc/sysrq-trigger", nil, 0) },
	"open a disk by number":  openDisk,
	"trace a child's parent": func() error { return unix.PtraceSeize(os.Getppid()) },
}

func second[T any](_ T, err error) error { return err }

func dial(path string) error {
	c, err := net.Dial("unix", path)
	if err == nil {
		err = c.Close()
	}
	return err
}

// rewrite writes what the first of paths that exists has.
func rewrite(paths ...string) error {
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if f := strings.Fields(string(b)); strings.Contains(string(b), "[") { // a choice
			b = []byte(strings.Trim(f[slices.IndexFunc(f, func(s string) bool { return s[0] == '[' })], "[]"))
		}
		return errors.Join(err, os.WriteFile(path, b, 0))
	}
	return os.ErrNotExist
}

func setMTU() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	r.SetUint32(60000)
	return unix.IoctlIfreq(fd, unix.SIOCSIFMTU, r)
}

func inNew(namespace uintptr) error {
	cmd := exec.Command("true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespace}
	return cmd.Run()
}

// openDisk makes a device in the Pod's volume and opens it.
func openDisk() error {
	path := filepath.Join(os.Getenv("VOLUME"), "disk")
	defer os.Remove(path)
	return errors.Join(unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 1))), second(os.Open(path)))
}

func number(name string) int {
	n, _ := strconv.Atoi(os.Getenv(name))
	return n
}

func agentPid() int { return number("AGENT") }

func readable(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Read(make([]byte, 1))
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func writable(path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	return os.Remove(path)
}

func socket(family, kind, protocol int) error {
	fd, err := unix.Socket(family, kind, protocol)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

// attackAsPod is this test's program inside a Pod: it tries everything, and prints what
// it is and what it could do.
func attackAsPod() {
	out := map[string]string{"uid": strconv.Itoa(os.Getuid()), "gid": strconv.Itoa(os.Getgid()), "pid": strconv.Itoa(os.Getpid())}
	b, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(line, ":")
		out[k] = strings.Join(strings.Fields(v), " ")
	}
	fail := os.WriteFile("/dev/null", []byte("x"), 0)
	if fail == nil && os.Getenv("VOLUME") != "" {
		fail = os.WriteFile(filepath.Join(os.Getenv("VOLUME"), "mine"), []byte("x"), 0o600)
	}
	if fail == nil {
		fail = os.WriteFile("/dev/termination-log", []byte("bye"), 0)
	}
	out["ordinary"] = fmt.Sprint(fail)
	out["tmp"] = fmt.Sprint(os.WriteFile("/tmp/mine", []byte("x"), 0o600))
	for _, name := range slices.Sorted(maps.Keys(tries)) {
		if name == "mount" || name == "make a user" { // they change what the others see
			continue
		}
		out["try "+name] = fmt.Sprint(tries[name]())
	}
	for _, name := range slices.Sorted(maps.Keys(more)) {
		out["more "+name] = fmt.Sprint(more[name]())
	}
	out["try make a user"] = fmt.Sprint(tries["make a user"]())
	out["try mount"] = fmt.Sprint(tries["mount"]())
	_ = os.WriteFile("/dev/termination-log", []byte("bye"), 0)
	b, _ = json.Marshal(out)
	fmt.Println(string(b))
}

// namespace is one of a level.
func (c *cluster) namespace(level string) string {
	c.t.Helper()
	ns := "level-" + level
	_, err := c.client.CoreV1().Namespaces().Create(c.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: ns, Labels: map[string]string{"pod-security.kubernetes.io/enforce": level},
	}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		c.t.Fatal(err)
	}
	return ns
}

// attack is a Pod that attacks, in a namespace of a level.
func (c *cluster) attack(level string, change func(*corev1.Pod)) *corev1.Pod {
	c.t.Helper()
	core := c.client.CoreV1()
	ns := c.namespace(level)
	dir := c.t.TempDir()
	key := filepath.Join(filepath.Dir(c.state), "pki.key")
	other := filepath.Join(c.state, "pods", "other", "volumes", "v", "file")
	if err := errors.Join(
		os.WriteFile(key, []byte("key"), 0o644), os.MkdirAll(filepath.Dir(other), 0o755), os.WriteFile(other, []byte("x"), 0o644),
		os.WriteFile("/run/of-the-machine", []byte("x"), 0o644), os.WriteFile(dir+"/file", []byte("x"), 0o644),
	); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = os.Remove("/run/of-the-machine") })
	socketPath := filepath.Join(filepath.Dir(c.state), "agent.sock")
	for _, path := range []string{socketPath, "@attacked"} {
		if l, err := net.Listen("unix", path); err == nil { // one for all attacks of a test
			c.t.Cleanup(func() { _ = l.Close() })
		}
	}
	another := exec.Command("sleep", "600")
	if err := another.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = another.Process.Kill()
		_ = another.Wait()
	})
	p := pod("attack", "")
	p.Namespace, p.Name, p.GenerateName = ns, "", "attack-"
	p.Spec.RestartPolicy, p.Spec.AutomountServiceAccountToken = corev1.RestartPolicyNever, new(false)
	p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	p.Spec.Containers[0].Command = []string{"/srv/attack"}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/opt"}}
	p.Spec.Containers[0].Env = []corev1.EnvVar{
		{Name: "RUNNER_TEST_SERVE", Value: "attack"}, {Name: "AGENT", Value: strconv.Itoa(os.Getpid())}, {Name: "KEY", Value: key},
		{Name: "OTHER", Value: other}, {Name: "TEMP", Value: dir + "/file"}, {Name: "VOLUME", Value: "/opt"},
		{Name: "SOCKET", Value: socketPath}, {Name: "OTHERPID", Value: strconv.Itoa(another.Process.Pid)},
	}
	if level == "restricted" {
		p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{
			RunAsNonRoot: new(true), AllowPrivilegeEscalation: new(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		}
	}
	if change != nil {
		change(p)
	}
	p, err := core.Pods(ns).Create(c.t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testbed.Patience) // the test's has ended
		defer cancel()
		if err := core.Pods(ns).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}); err != nil {
			c.t.Error(err)
		}
	})
	return p
}

// ended waits for the end of an attack and returns what it printed.
func (c *cluster) ended(p *corev1.Pod) (*corev1.Pod, map[string]string) {
	c.t.Helper()
	var got *corev1.Pod
	await(c.t, "the end of the attack", func() bool {
		var err error
		got, err = c.client.CoreV1().Pods(p.Namespace).Get(c.t.Context(), p.Name, metav1.GetOptions{})
		if err != nil {
			c.t.Fatal(err)
		}
		return got.Status.Phase == corev1.PodSucceeded || got.Status.Phase == corev1.PodFailed
	})
	if got.Status.ContainerStatuses[0].State.Terminated == nil || got.Status.ContainerStatuses[0].State.Terminated.Reason == "StartError" {
		c.t.Fatalf("the attack did not start: %+v", got.Status)
	}
	text := c.logOf(got, 0)
	_, after, found := strings.Cut(text, "{")
	out := map[string]string{}
	if err := json.Unmarshal([]byte("{"+after), &out); !found || err != nil {
		c.t.Fatalf("%s %+v\n%v", text, got.Status.ContainerStatuses, err)
	}
	return got, out
}

// armed puts this program where every Pod sees it.
func armed(t *testing.T) {
	t.Helper()
	if err := unix.Mount("tmpfs", "/srv", "tmpfs", 0, "mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/srv", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	b, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile("/srv/attack", b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What a Pod mounts, and the links that it puts into its volumes, lead nowhere: the shim
// opens files as root of the machine.
func TestVolumesLeadNowhere(t *testing.T) {
	armed(t)
	c := newCluster(t, func(o *runner.Options) { o.Hide = []string{filepath.Dir(o.StateDir)} })
	outside := t.TempDir()
	for _, at := range []string{"/dev", "/proc", "/sys", "/dev/pts", "/opt/x/proc", "/opt/x" + outside} {
		link := strings.HasPrefix(at, "/opt/x")
		p := c.attack("baseline", func(p *corev1.Pod) {
			main := &p.Spec.Containers[0]
			if !link {
				main.VolumeMounts[0].MountPath = at
				return
			}
			// The volume's link leads out of the confinement; the file would be made there.
			main.TerminationMessagePath = at + "/made"
			maker := *main.DeepCopy()
			maker.Name, maker.TerminationMessagePath = "maker", ""
			maker.Command = []string{"/bin/sh", "-c", "ln -s /proc/1/root /opt/x"}
			p.Spec.InitContainers = []corev1.Container{maker}
		})
		var got *corev1.Pod
		await(t, "the end of the Pod with "+at, func() bool {
			var err error
			got, err = c.client.CoreV1().Pods(p.Namespace).Get(t.Context(), p.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return got.Status.Phase == corev1.PodSucceeded || got.Status.Phase == corev1.PodFailed
		})
		if end := got.Status.ContainerStatuses[0].State.Terminated; end == nil || end.Reason != "StartError" || !link &&
			!strings.Contains(end.Message, "is not for volumes of a Pod that may not be privileged") {
			t.Errorf("%s: %+v", at, got.Status.ContainerStatuses[0].State)
		}
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("made on the machine: %v, %v", entries, err)
	}
}

// A Pod that may be privileged can do all of it, and others nothing.
func TestAttacks(t *testing.T) {
	armed(t)
	c := newCluster(t, func(o *runner.Options) { o.Hide = []string{filepath.Dir(o.StateDir)} })
	uids := runner.DefaultUIDRange
	for _, level := range []string{"privileged", "baseline", "restricted"} {
		t.Run(level, func(t *testing.T) {
			c := *c
			c.t = t
			p, got := c.ended(c.attack(level, nil))
			for name := range tries {
				if answer := got["try "+name]; (answer == "<nil>") != (level == "privileged") {
					t.Errorf("%s: %s", name, answer)
				}
			}
			for name := range more {
				if answer := got["more "+name]; answer == "" || answer == "<nil>" && level != "privileged" {
					t.Errorf("%s: %q", name, answer)
				}
			}
			if got["ordinary"] != "<nil>" || got["tmp"] != "<nil>" {
				t.Errorf("what every Pod may do: %s, %s", got["ordinary"], got["tmp"])
			}
			if m := p.Status.ContainerStatuses[0].State.Terminated.Message; m != "bye" {
				t.Errorf("the message is %q", m)
			}
			st, err := os.Stat(filepath.Join(c.state, "pods", string(p.UID), "volumes", "v", "mine"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat("/tmp/mine"); err == nil && level != "privileged" {
				t.Error("/tmp is the machine's")
			}
			_ = os.Remove("/tmp/mine")
			owner := st.Sys().(*syscall.Stat_t).Uid
			if inRange := owner >= uids.First && owner <= uids.Last; inRange == (level == "privileged") {
				t.Errorf("a file is of the user %d", owner)
			}
			want := map[string]string{"Seccomp": "2", "NoNewPrivs": "0", "CapEff": "0000000000000000", "uid": "1000"}
			switch level {
			case "privileged":
				want = map[string]string{"Seccomp": "0", "NoNewPrivs": "0", "uid": "0"}
			case "restricted":
				want["NoNewPrivs"], want["CapBnd"] = "1", "0000000000000000"
			default:
				want["CapBnd"] = "00000000a80425fb" // containerd's default
			}
			for k, v := range want {
				if got[k] != v {
					t.Errorf("%s is %s, want %s", k, got[k], v)
				}
			}
		})
	}
}

// Root of a Pod that may not be privileged is an unprivileged user of the machine, and can be no other one.
func TestAttacksAsUser0(t *testing.T) {
	armed(t)
	c := newCluster(t, func(o *runner.Options) { o.Hide = []string{filepath.Dir(o.StateDir)} })
	p, got := c.ended(c.attack("baseline", func(p *corev1.Pod) {
		p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: new(int64(0))}
	}))
	for name := range tries {
		if answer := got["try "+name]; answer == "<nil>" && name != "become root" {
			t.Errorf("%s: done", name)
		}
	}
	for name := range more {
		if got["more "+name] == "<nil>" {
			t.Errorf("%s: done", name)
		}
	}
	st, err := os.Stat(filepath.Join(c.state, "pods", string(p.UID), "volumes", "v", "mine"))
	if err != nil {
		t.Fatal(err)
	}
	owner, uids := st.Sys().(*syscall.Stat_t).Uid, runner.DefaultUIDRange
	if owner < uids.First || owner > uids.Last || got["uid"] != "0" {
		t.Errorf("a file is of the user %d, whom the Pod calls %s", owner, got["uid"])
	}
}
