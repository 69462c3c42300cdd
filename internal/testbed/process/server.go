package process

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Server is a 'fairlead server', which may end and be started again.
type Server struct {
	// Process is that of the last start.
	*Process
	// Kubeconfig is the file of an administrator, there once the server is ready.
	Kubeconfig string
	// Client is an administrator, without limits; it is nil until Ready has been
	// called once.
	Client *kubernetes.Clientset
	// Config is that of Client.
	Config *rest.Config

	command func() *exec.Cmd
	plane   *controlPlane // of a real kube-apiserver
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
}

// NewServer prepares a server with its data in dir. program is the path of
// fairlead; on is its host, nil for this process's own namespace.
func NewServer(on *testbed.Host, program, dir string, flags ...string) *Server {
	args := append([]string{"server", "--data-dir", dir}, flags...)
	s := &Server{Kubeconfig: filepath.Join(dir, "admin.kubeconfig")}
	s.command = func() (cmd *exec.Cmd) {
		if on == nil {
			cmd = exec.Command(program, args...)
		} else {
			cmd = on.Command(context.Background(), program, args...)
		}
		cmd.Env = append(os.Environ(), "HOME="+dir)
		return cmd
	}
	if on != nil {
		s.dial = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			on.Do(func() { conn, err = (&net.Dialer{}).DialContext(ctx, network, address) })
			return conn, err
		}
	}
	return s
}

// Start starts the server.
func (s *Server) Start(t testing.TB) {
	t.Helper()
	s.Process = Start(t, s.command())
}

// AwaitReady waits until the server is ready.
func (s *Server) AwaitReady(t testing.TB) {
	t.Helper()
	testbed.Until(t, "the server to be ready", func() error { return s.Ready(t.Context()) })
}

// KubeconfigAt writes a copy of Kubeconfig for machines that reach the server at another address of it, and
// returns the file's name. Everybody on this machine can read it.
func (s *Server) KubeconfigAt(t testing.TB, a netip.Addr) string {
	t.Helper()
	config, err := clientcmd.LoadFromFile(s.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range config.Clusters {
		c.Server = "https://" + netip.AddrPortFrom(a, 6443).String()
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := errors.Join(clientcmd.WriteToFile(*config, file), os.Chmod(file, 0o644)); err != nil {
		t.Fatal(err)
	}
	return file
}

// Admin returns the configuration of an administrator, with the keys and without limits, once Ready has been called.
func (s *Server) Admin(t testing.TB) *rest.Config {
	t.Helper()
	cfg := rest.CopyConfig(s.Config)
	cfg.WarningHandler, cfg.Timeout = nil, 0
	if err := rest.LoadTLSFiles(cfg); err != nil {
		t.Fatal(err)
	}
	return cfg
}

// Controllers returns the configuration of a client that authenticates as the controllers, once the server is ready.
func (s *Server) Controllers(t testing.TB) *rest.Config {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(filepath.Dir(s.Kubeconfig), "controllers.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// Connect returns a client with the certificate that Kubeconfig has now.
func (s *Server) Connect() (*rest.Config, *kubernetes.Clientset, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig)
	if err != nil {
		return nil, nil, err
	}
	cfg.QPS, cfg.Timeout, cfg.WarningHandler, cfg.Dial = -1, testbed.Patience/8, rest.NoWarnings{}, s.dial
	client, err := kubernetes.NewForConfig(cfg)
	return cfg, client, err
}

// Ready asks the server once whether it is ready.
func (s *Server) Ready(ctx context.Context) error {
	if s.Client == nil {
		var err error
		if s.Config, s.Client, err = s.Connect(); err != nil {
			return err
		}
	}
	err := s.Client.RESTClient().Get().AbsPath("/readyz").Timeout(5 * time.Second).Do(ctx).Error()
	if apierrors.IsUnauthorized(err) {
		s.Client = nil // its certificate may have ended before the server has written the next one
	}
	return err
}

// FreePort returns a port of 127.0.0.1 on which nothing listens. It is outside of
// the range from which the kernel gives ports to sockets that ask for any, so that
// it is still free when a program comes to listen on it. It does not listen itself: a
// copy of its socket in a process that is being forked would keep the program from it.
func FreePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 20000 + rand.IntN(10000)
		if !socket.Taken(svc.TCP, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(port))) {
			return port
		}
	}
	t.Fatal("no free port between 20000 and 29999")
	return 0
}
