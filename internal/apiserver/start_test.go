package apiserver_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// serveEnv makes the test binary a server with the given data directory.
const serveEnv = "FAIRLEAD_TEST_SERVE"

func TestMain(m *testing.M) {
	if dir := os.Getenv(serveEnv); dir != "" {
		serve(dir)
	}
	os.Exit(m.Run())
}

// serve runs a server that syncs its writes, until the process is killed.
func serve(dir string) {
	s, err := apiserver.New(apiserver.Options{DataDir: dir, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	go func() {
		<-s.Ready()
		fmt.Println("ready")
	}()
	if err := s.Run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		fmt.Println(err)
		os.Exit(1)
	}
}

// spawn starts a server in its own process and waits until it is ready.
func spawn(t *testing.T, dir string) (kill func(), c *kubernetes.Clientset) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serveEnv+"="+dir)
	return spawnAs(t, cmd, dir)
}

// spawnAs is spawn with another command.
func spawnAs(t *testing.T, cmd *exec.Cmd, dir string) (kill func(), c *kubernetes.Clientset) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	if cmd.Stderr == nil {
		cmd.Stderr = &log
	}
	wait, err := process.Launch(cmd)
	if err != nil {
		t.Fatal(err)
	}
	ended := sync.OnceValue(wait)
	kill = func() {
		cmd.Process.Kill()
		io.Copy(io.Discard, out)
		ended()
	}
	t.Cleanup(func() {
		kill()
		if t.Failed() {
			t.Logf("the server's log:\n%s", log.String())
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		t.Fatalf("the server wrote %q, %v", line, err)
	}
	// The process may have mounted something there.
	dir = fmt.Sprintf("/proc/%d/root%s", cmd.Process.Pid, dir)
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(dir, "admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS = -1
	return kill, kubernetes.NewForConfigOrDie(cfg)
}

// A server killed in the middle of writing has, when it comes back, every
// write that it acknowledged.
func TestKillLosesNoAcknowledgedWrite(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := t.TempDir()
	acked := map[string]bool{}
	const rounds, writes = 3, 40
	for round := range rounds {
		kill, c := spawn(t, dir)
		done := make(chan string, writes*2)
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		go func() {
			defer close(done)
			for i := 0; ctx.Err() == nil; i++ {
				name := fmt.Sprintf("cm-%d-%d", round, i)
				if _, err := c.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
					metav1.CreateOptions{}); err != nil {
					return
				}
				select {
				case done <- name:
				case <-ctx.Done():
					return
				}
			}
		}()
		for name := range done {
			acked[name] = true
			if len(acked) == (round+1)*writes {
				kill()
			}
		}
		cancel()
		kill()
	}
	_, c := spawn(t, dir)
	l, err := c.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, cm := range l.Items {
		delete(acked, cm.Name)
	}
	if len(acked) != 0 || len(l.Items) < rounds*writes {
		t.Errorf("%d writes lost (%v), %d kept", len(acked), acked, len(l.Items))
	}
}

func TestRestartKeepsEverything(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := func(o *apiserver.Options) { o.DataDir = dir }
	s, stop := apiservertest.StartStoppable(t, at)
	c := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	before, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kept"}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "later"}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	token, port := s.Token(), s.Port()
	stop()
	s = apiservertest.StartServer(t, at, func(o *apiserver.Options) { o.SecurePort = port })
	maps := kubernetes.NewForConfigOrDie(s.LoopbackConfig()).CoreV1().ConfigMaps("default")
	after, err := maps.Get(t.Context(), "kept", metav1.GetOptions{})
	if err != nil || after.UID != before.UID {
		t.Errorf("got %v, %v", after, err)
	}
	// Events are not kept. A watch that were ended without being told so would begin there for ever.
	w, err := maps.Watch(t.Context(), metav1.ListOptions{ResourceVersion: before.ResourceVersion, AllowWatchBookmarks: true})
	if err == nil {
		defer w.Stop()
		err = apierrors.FromObject(testbed.Receive(t, "what becomes of a watch from before the restart", w.ResultChan()).Object)
	}
	if !apierrors.IsResourceExpired(err) {
		t.Errorf("a watch from before the restart: %v", err)
	}
	if s.Token() != token {
		t.Error("the join token changed")
	}
}

// Run returns when everything has stopped, also with watches open, and the
// port and the directory can be had again at once.
func TestStop(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = dir })
	c := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	w, err := c.CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	begin := time.Now()
	stop()
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("the stop took %s", took)
	}
	again, err := apiserver.New(apiserver.Options{DataDir: dir, SecurePort: s.Port()})
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

// A request that has begun when the server stops is finished.
func TestStopFinishesRequests(t *testing.T) {
	t.Parallel()
	s, stop := apiservertest.StartStoppable(t)
	client, err := rest.HTTPClientFor(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	body, w := io.Pipe()
	// The server answers 100 Continue when the handler begins to read the body.
	begun := make(chan struct{})
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got100Continue: func() { close(begun) }})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/api/v1/namespaces/default/configmaps", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Expect", "100-continue")
	answer := make(chan string, 1)
	go func() {
		resp, err := client.Do(req)
		if err != nil {
			answer <- err.Error()
			return
		}
		resp.Body.Close()
		answer <- resp.Status
	}()
	// The write returns when the transport has taken the bytes; the pause of
	// the body keeps the request open while the server stops.
	if _, err := io.WriteString(w, `{"apiVersion":"v1","kind":"ConfigMap",`); err != nil {
		t.Fatal(err)
	}
	select {
	case <-begun:
	case got := <-answer:
		t.Fatalf("answered too early: %s", got)
	case <-time.After(30 * time.Second):
		t.Fatal("the request has not begun within 30 s")
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop() }()
	eventually(t, "the server takes no new connections", func() bool {
		c, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "https://"))
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	if _, err := io.WriteString(w, `"metadata":{"name":"late"}}`); err != nil {
		t.Error(err)
	}
	w.Close()
	if got := <-answer; got != "201 Created" {
		t.Errorf("got %s", got)
	}
	<-stopped
}

// What keeps a server from starting is reported in one line, with the remedy.
func TestRefusals(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).AddrPort().Port()

	used := t.TempDir()
	holder, err := apiserver.New(apiserver.Options{DataDir: used})
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Close()

	newer := t.TempDir()
	write(t, newer, "version", "999\n")
	damaged := t.TempDir()
	write(t, damaged, "version", "x\n")
	badCA := t.TempDir()
	if err := os.Mkdir(filepath.Join(badCA, "pki"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, badCA, "pki/ca.crt", "not a certificate")
	badToken := t.TempDir()
	write(t, badToken, "node-token", "nonsense")
	file := filepath.Join(t.TempDir(), "file")
	write(t, filepath.Dir(file), "file", "")

	for _, c := range []struct {
		o    apiserver.Options
		want string
	}{
		{apiserver.Options{}, "--data-dir"},
		{apiserver.Options{DataDir: t.TempDir(), SecurePort: port}, fmt.Sprintf("cannot listen on 127.0.0.1:%d: the port is taken", port)},
		{apiserver.Options{DataDir: t.TempDir(), BindAddresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}},
			"this machine does not have the address"},
		{apiserver.Options{DataDir: used}, "is in use by process " + strconv.Itoa(os.Getpid())},
		{apiserver.Options{DataDir: newer}, "was written by a newer fairlead"},
		{apiserver.Options{DataDir: damaged}, "is damaged"},
		{apiserver.Options{DataDir: badCA}, "holds no PEM certificate"},
		{apiserver.Options{DataDir: badToken}, "node-token"},
		{apiserver.Options{DataDir: filepath.Join(file, "below")}, "cannot make the data directory"},
		{apiserver.Options{DataDir: t.TempDir(), AdvertiseAddress: netip.MustParseAddr("127.0.0.1")}, "--advertise-address"},
		{apiserver.Options{DataDir: t.TempDir(), ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/30")}}, "too small"},
		{apiserver.Options{DataDir: t.TempDir(), ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.1/16")}}, "want a network"},
		{apiserver.Options{DataDir: t.TempDir(), Etcd: store.External{CertFile: "x"}}, "belong together"},
	} {
		s, err := apiserver.New(c.o)
		if err == nil {
			s.Close()
			t.Errorf("%+v was accepted, want %q", c.o, c.want)
		} else if !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %q, want one line with %q", err, c.want)
		}
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// An external etcd that does not answer is named in one line.
func TestEtcdUnreachable(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	s, err := apiserver.New(apiserver.Options{DataDir: t.TempDir(), Etcd: store.External{Servers: []string{"http://" + addr}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	err = s.Run(ctx)
	if err == nil || !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), "--etcd-servers") ||
		strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v", err)
	}
}
