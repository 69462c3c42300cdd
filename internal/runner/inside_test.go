package runner_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
)

// look prints whom a process is, where it is and what it may: all of it is equal for the
// processes of a container.
const look = `for n in net mnt pid uts ipc cgroup; do readlink /proc/self/ns/$n; done
	cat /proc/self/uid_map /proc/self/gid_map /proc/self/cgroup /proc/self/oom_score_adj; cat /proc/sys/kernel/hostname
	grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs|Seccomp):' /proc/self/status`

// Processes that come into a container later are confined in the same way: those of hooks,
// probes and exec, with a terminal or without. Forwarded ports are those of the Pod.
func TestLaterProcessesAreConfined(t *testing.T) {
	armed(t)
	e := newEndpoint(t)
	p := e.attack("restricted", func(p *corev1.Pod) {
		main := &p.Spec.Containers[0]
		to := func(file string) []string { return []string{"sh", "-c", "(" + look + ") > /opt/" + file} }
		main.Command = []string{"sh", "-c", "(" + look + ") > /opt/main; echo to the log > /dev/stdout; exec sleep 600"}
		main.Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: to("hook")}}}
		main.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: to("probe")}}, TimeoutSeconds: 30}
		p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: new(int64(1234)), SupplementalGroups: []int64{7, 8}}
	})
	await(t, "the Pod", func() bool { p = e.again(p); return isReady(p) })
	await(t, "the log", func() bool { return strings.Contains(e.logOf(p, 0), "to the log") })
	volume := filepath.Join(e.state, "pods", string(p.UID), "volumes", "v")
	read := func(file string) string {
		b, err := os.ReadFile(filepath.Join(volume, file))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	want := read("main")
	if !strings.Contains(want, "Seccomp:\t2") || !strings.Contains(want, "NoNewPrivs:\t1") || !strings.Contains(want, "Uid:\t1234") {
		t.Fatalf("the first process is\n%s", want)
	}
	var plain, terminal bytes.Buffer
	if err := e.execAt(p, remotecommand.StreamOptions{Stdout: &plain}, "sh", "-c", "("+look+") > /dev/stdout"); err != nil {
		t.Fatal(err)
	}
	tty := remotecommand.StreamOptions{Stdout: &terminal, Tty: true}
	if err := e.execAt(p, tty, "sh", "-c", look+"; echo through > /dev/stdout"); err != nil {
		t.Error(err)
	}
	onTerminal, through := strings.CutSuffix(strings.ReplaceAll(terminal.String(), "\r\n", "\n"), "through\n")
	if !through {
		t.Errorf("a terminal cannot be opened again by its name: %q", terminal.String())
	}
	for name, got := range map[string]string{
		"hook": read("hook"), "probe": read("probe"), "exec": plain.String(), "exec with a terminal": onTerminal,
	} {
		if got != want {
			t.Errorf("%s is\n%swant\n%s", name, got, want)
		}
	}
	var out bytes.Buffer
	if err := e.execAt(p, remotecommand.StreamOptions{Stdout: &out}, "/srv/attack"); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%s: %v", out.String(), err)
	}
	for name := range tries {
		if answer := got["try "+name]; answer == "<nil>" || answer == "" {
			t.Errorf("by exec: %s: %q", name, answer)
		}
	}
	e.forwardsNothingOfTheNode(p)
}

// forwardsNothingOfTheNode fails if a port forwarded to a Pod leads to a server on the
// node's loopback device.
func (e *endpoint) forwardsNothingOfTheNode(p *corev1.Pod) {
	e.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		e.t.Fatal(err)
	}
	defer l.Close()
	go func() { _ = http.Serve(l, http.NotFoundHandler()) }() // ends with l
	u, err := url.Parse(fmt.Sprintf("%s/portForward/%s/%s", e.url, p.Namespace, p.Name))
	if err != nil {
		e.t.Fatal(err)
	}
	rt, upgrader, err := spdy.RoundTripperFor(e.rest)
	if err != nil {
		e.t.Fatal(err)
	}
	stop, ready := make(chan struct{}), make(chan struct{})
	_, port, _ := net.SplitHostPort(l.Addr().String())
	fw, err := portforward.NewOnAddresses(spdy.NewDialer(upgrader, &http.Client{Transport: rt}, http.MethodPost, u), []string{"127.0.0.1"},
		[]string{"0:" + port}, stop, ready, io.Discard, io.Discard)
	if err != nil {
		e.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- fw.ForwardPorts() }()
	<-ready
	ports, err := fw.GetPorts()
	if err != nil {
		e.t.Fatal(err)
	}
	if res, err := http.Get("http://127.0.0.1:" + strconv.Itoa(int(ports[0].Local))); err == nil {
		res.Body.Close()
		e.t.Error("a port forwarded to the Pod leads to the node's own loopback device")
	}
	close(stop)
	<-done
}
