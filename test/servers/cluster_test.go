package servers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// store is an etcd cluster with all its members in this process, on loopback.
type store struct {
	urls   []string
	client *clientv3.Client
}

func startStore(t *testing.T, members int) *store {
	t.Helper()
	peers := make([]url.URL, members)
	var initial []string
	for i := range peers {
		peers[i] = url.URL{Scheme: "http", Host: "127.0.0.1:" + strconv.Itoa(freePort(t))}
		initial = append(initial, fmt.Sprintf("m%d=%s", i, peers[i].String()))
	}
	s := &store{}
	var started []*embed.Etcd
	for i := range members {
		c := embed.NewConfig()
		c.Name, c.Dir = fmt.Sprintf("m%d", i), t.TempDir()
		c.ListenClientUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
		c.AdvertiseClientUrls = c.ListenClientUrls
		c.ListenPeerUrls, c.AdvertisePeerUrls = peers[i:i+1], peers[i:i+1]
		c.InitialCluster = strings.Join(initial, ",")
		c.UnsafeNoFsync = true
		c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
		e, err := embed.StartEtcd(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		started = append(started, e)
	}
	for _, e := range started {
		select {
		case <-e.Server.ReadyNotify():
		case <-time.After(time.Minute):
			t.Fatal("etcd is not ready after a minute")
		}
		s.urls = append(s.urls, "http://"+e.Clients[0].Addr().String())
	}
	var err error
	if s.client, err = clientv3.New(clientv3.Config{Endpoints: s.urls, Logger: zap.NewNop()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.client.Close() })
	return s
}

// server is one API server: a process that may be killed and started again.
type server struct {
	t    *testing.T
	dir  string
	args []string

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{}
	// client is nil until the server has been started once.
	client *kubernetes.Clientset
}

// limits make what a kill leaves behind free again soon.
const (
	writeTimeout = 3 * time.Second
	repairPeriod = 2 * time.Second
)

func newServer(t *testing.T, s *store, i int, flags ...string) *server {
	dir := filepath.Join(t.TempDir(), strconv.Itoa(i))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	v := &server{t: t, dir: dir, args: append([]string{
		"server", "--controllers", "none", "--data-dir", filepath.Join(dir, "data"), "--etcd-servers", strings.Join(s.urls, ","),
		"--bind-address", "127.0.0.1", "--secure-port", strconv.Itoa(freePort(t)),
		"--service-write-timeout", writeTimeout.String(), "--allocation-repair-period", repairPeriod.String(),
	}, flags...)}
	t.Cleanup(v.kill)
	return v
}

func (s *server) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Error(err)
		return
	}
	defer log.Close()
	cmd := exec.Command(fairlead, s.args...)
	cmd.Stdout, cmd.Stderr = log, log
	// A server must not outlive this process, whatever ends it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		s.t.Error(err)
		return
	}
	s.cmd, s.done = cmd, make(chan struct{})
	go func(done chan struct{}) {
		_ = cmd.Wait() // it is killed in the end
		close(done)
	}(s.done)
}

// kill ends the process at once, by SIGKILL, and waits for its end.
func (s *server) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	<-s.done
	s.cmd = nil
}

// await waits until the server answers.
func (s *server) await(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := s.ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			log, _ := os.ReadFile(filepath.Join(s.dir, "log"))
			return fmt.Errorf("the server is not ready: %w\n%s", err, log)
		}
	}
}

func (s *server) ready(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client == nil {
		cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(s.dir, "data", "admin.kubeconfig"))
		if err != nil {
			return err
		}
		cfg.QPS, cfg.Timeout, cfg.WarningHandler = -1, 10*time.Second, rest.NoWarnings{}
		if s.client, err = kubernetes.NewForConfig(cfg); err != nil {
			return err
		}
	}
	return s.client.RESTClient().Get().AbsPath("/readyz").Timeout(5 * time.Second).Do(ctx).Error()
}

// freePort is a port of 127.0.0.1 that nobody listens on. It lies outside of the
// range from which the kernel gives ports to everyone else.
func freePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		p := 20000 + rand.IntN(10000)
		l, err := net.Listen("tcp4", "127.0.0.1:"+strconv.Itoa(p))
		if err == nil {
			_ = l.Close()
			return p
		}
	}
	t.Fatal("no free port between 20000 and 29999")
	return 0
}
