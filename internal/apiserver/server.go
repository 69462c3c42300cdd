// Package apiserver is the Kubernetes API server: it assembles
// k8s.io/apiserver's generic server from the storages of package registry, an
// embedded (or external) etcd, certificates, authentication and authorization.
//
// New locks the data directory, makes the certificates and binds the port; Run
// serves until its context is done and returns when everything has stopped.
package apiserver

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/clientlog"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/listen"
	"github.com/fairlead/fairlead/internal/apiserver/store"
)

// Server is an API server. It can be run once.
type Server struct {
	opts     Options
	log      *slog.Logger
	dir      *store.Dir
	listener *listen.Listener
	creds    *certs.Credentials
	peering  *store.Peering // nil for the only server
	loopback *rest.Config
	ready    chan struct{}
	close    sync.Once

	mu    sync.Mutex
	token join.Token // the zero Token before the server is ready, where its start has made one
}

// New prepares a server: it locks the data directory, makes or checks the
// certificates and binds the port. Nothing is served before Run. A server that is
// not run must be closed.
func New(o Options) (*Server, error) { return newServer(o, time.Now) }

func newServer(o Options, now func() time.Time) (*Server, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	clientlog.Set(o.Log)
	s := &Server{opts: o, log: o.Log, ready: make(chan struct{})}
	if err := s.acquire(now); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// acquire locks the data directory and binds the port. Close releases both.
func (s *Server) acquire(now func() time.Time) (err error) {
	if s.dir, err = store.OpenDir(s.opts.DataDir); err != nil {
		return err
	}
	if s.listener, err = listen.On(s.opts.BindAddresses, s.opts.SecurePort); err != nil {
		return err
	}
	s.listener.Add(s.opts.Listeners...)
	if !s.opts.AdvertiseAddress.IsValid() {
		s.opts.AdvertiseAddress = listen.ChooseAdvertise(s.opts.BindAddresses)
	}
	s.peering, err = store.LoadPeering(store.PeeringOptions{
		DataDir: s.opts.DataDir, Server: s.publicURL(), Name: s.opts.ServerName, First: s.opts.ClusterInit,
		External: len(s.opts.Etcd.Servers) > 0, Address: s.opts.AdvertiseAddress, Port: s.opts.EtcdPeerPort, Log: s.log,
	})
	if err != nil {
		return err
	}
	addrs := append(slices.Clone(s.opts.BindAddresses), s.opts.AdvertiseAddress)
	for _, c := range s.opts.ServiceCIDRs {
		addrs = append(addrs, c.Addr().Next())
	}
	names := certs.NamesFor(s.opts.Names, addrs)
	names.Peer = s.peering != nil
	if s.creds, err = certs.New(s.dir.Path, names, s.URL(), s.opts.CertificateLife, now, s.log); err != nil {
		return err
	}
	if s.peering != nil {
		s.peering.Authorities = s.creds.PKI.Bundle
	}
	if s.token, err = s.creds.Token(); err != nil {
		return err
	}
	s.loopback = &rest.Config{
		Host:            s.URL(),
		BearerToken:     uuid.NewString(),
		TLSClientConfig: rest.TLSClientConfig{CAFile: s.dir.File("pki/ca.crt"), ServerName: s.creds.Serving.ServerName()},
		QPS:             -1,
		UserAgent:       "fairlead/loopback",
		WarningHandler:  rest.NoWarnings{},
	}
	return nil
}

// URL is the address of the server for clients on this machine.
func (s *Server) URL() string {
	return "https://" + listen.LocalAddress(s.opts.BindAddresses, s.Port())
}

// publicURL is the address of the server for others, if there is one.
func (s *Server) publicURL() string {
	if a := s.opts.AdvertiseAddress; a.IsValid() {
		return "https://" + netip.AddrPortFrom(a, s.Port()).String()
	}
	return s.URL()
}

// Port is the TCP port the server listens on.
func (s *Server) Port() uint16 { return s.listener.Port() }

// AdvertiseAddress is where others reach the server; invalid if they cannot.
func (s *Server) AdvertiseAddress() netip.Addr { return s.opts.AdvertiseAddress }

// Kubeconfig is the path of the kubeconfig of the administrator.
func (s *Server) Kubeconfig() string { return s.dir.File("admin.kubeconfig") }

// TokenFile is the path of the file with the join token.
func (s *Server) TokenFile() string { return s.dir.File("node-token") }

// Token is the join token that the start has made, valid for join.DefaultLife; see
// package join. It must not be called before the server is ready.
func (s *Server) Token() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.token.String()
}

// LoopbackConfig returns the configuration of an all-powerful client in this
// process. It is valid while the server runs.
func (s *Server) LoopbackConfig() *rest.Config { return rest.CopyConfig(s.loopback) }

// ControllersConfig returns the configuration of a client that authenticates as the
// controllers.
func (s *Server) ControllersConfig() *rest.Config { return s.creds.ControllersConfig() }

// NodeConfig returns the configuration of a client in this process that
// authenticates as the named node.
func (s *Server) NodeConfig(name string) (*rest.Config, error) { return s.creds.NodeConfig(name) }

// Ready is closed when the server answers and what it creates at the start exists.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Close releases the port and the data directory. Run calls it at its end.
func (s *Server) Close() error {
	s.close.Do(func() {
		if s.listener != nil {
			s.listener.Close()
		}
		if s.dir != nil {
			s.dir.Close()
		}
	})
	return nil
}

// Run serves until ctx is done or something fails for good. In-flight requests are
// finished. It returns nil after a stop through ctx.
func (s *Server) Run(ctx context.Context) error {
	defer s.Close()
	kept, err := s.openStore(ctx)
	if err != nil {
		return err
	}
	defer kept.Stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a, err := s.assemble(ctx, kept)
	if err != nil {
		return err
	}
	if a.members != nil {
		defer a.members.Close()
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	for _, loop := range a.loops() {
		wg.Go(func() { loop(ctx) })
	}
	wg.Go(func() {
		select {
		case err := <-kept.Failed: // nil for an external store, which never fails
			s.log.Error("the store failed; stopping", "err", err)
			cancel(err)
		case <-ctx.Done():
		}
	})
	stopped := a.drain.Run(ctx, a.prepare().RunWithContext)
	// The first failure is the cause of what could not be stopped because of it.
	cause := context.Cause(ctx)
	if cause != nil && !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	return stopped
}

func (s *Server) openStore(ctx context.Context) (*store.Store, error) {
	if len(s.opts.Etcd.Servers) > 0 {
		return store.Reach(ctx, s.opts.Etcd, s.log)
	}
	if s.peering != nil {
		if err := s.becomeMember(ctx); err != nil {
			return nil, err
		}
	}
	return store.Start(ctx, s.dir.File("etcd"), store.Options{
		Quota: s.opts.EtcdQuota, Prefix: s.opts.Etcd.Prefix, UnsafeNoFsync: s.opts.UnsafeNoFsync, Log: s.log,
	}, s.peering)
}

// onlyServer reports whether no other server writes to the store.
func (s *Server) onlyServer() bool { return len(s.opts.Etcd.Servers) == 0 && s.peering == nil }
