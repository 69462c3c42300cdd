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
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/google/uuid"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/clientlog"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/rotation"
)

// Server is an API server. It can be run once.
type Server struct {
	opts     Options
	log      *slog.Logger
	dir      *dataDir
	listener *multiListener
	creds    *credentials
	peering  *peering                        // nil for the only server
	joining  func(http.Handler) http.Handler // answers servers that join; nil for the only server
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
	if err := s.prepare(now); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// prepare acquires the data directory and the port, which Close releases.
func (s *Server) prepare(now func() time.Time) (err error) {
	if s.dir, err = openDataDir(s.opts.DataDir); err != nil {
		return err
	}
	if s.listener, err = listen(s.opts.BindAddresses, s.opts.SecurePort); err != nil {
		return err
	}
	s.listener.listeners = append(s.listener.listeners, s.opts.Listeners...)
	if !s.opts.AdvertiseAddress.IsValid() {
		s.opts.AdvertiseAddress = chooseAdvertise(s.opts.BindAddresses)
	}
	if s.peering, err = s.loadPeering(); err != nil {
		return err
	}
	names := namesFor(s.opts)
	names.peer = s.peering != nil
	if s.creds, err = newCredentials(s.dir, names, s.URL(), s.opts.CertificateLife, now, s.log); err != nil {
		return err
	}
	if s.peering != nil {
		s.peering.pki = s.creds.pki
	}
	if s.token, err = s.creds.token(); err != nil {
		return err
	}
	s.loopback = &rest.Config{
		Host:            s.URL(),
		BearerToken:     uuid.NewString(),
		TLSClientConfig: rest.TLSClientConfig{CAFile: s.dir.file("pki/ca.crt"), ServerName: s.creds.serving.name()},
		QPS:             -1,
		UserAgent:       "fairlead/loopback",
		WarningHandler:  rest.NoWarnings{},
	}
	return nil
}

// URL is the address of the server for clients on this machine.
func (s *Server) URL() string { return "https://" + localAddress(s.opts.BindAddresses, s.Port()) }

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
func (s *Server) Kubeconfig() string { return s.dir.file("admin.kubeconfig") }

// TokenFile is the path of the file with the join token.
func (s *Server) TokenFile() string { return s.dir.file("node-token") }

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
func (s *Server) ControllersConfig() *rest.Config { return s.creds.controllersConfig() }

// NodeConfig returns the configuration of a client in this process that
// authenticates as the named node.
func (s *Server) NodeConfig(name string) (*rest.Config, error) { return s.creds.nodeConfig(name) }

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
	store, err := s.openStore(ctx)
	if err != nil {
		return err
	}
	defer store.stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a, err := s.assemble(ctx, store)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() { s.creds.run(ctx) })
	wg.Go(func() { s.awaitReady(ctx, a.certs.rotation) })
	wg.Go(func() { a.storage.Run(ctx, a.client) })
	wg.Go(func() { a.keeper.run(ctx) })
	wg.Go(func() { a.guard.run(ctx) })
	wg.Go(func() { a.quotas.run(ctx) })
	wg.Go(func() { a.hooks.run(ctx) })
	if a.members != nil {
		defer a.members.Close()
		wg.Go(func() { a.members.Settle(ctx) })
	}
	wg.Go(func() {
		select {
		case <-s.ready: // the objects that it changes exist
			a.certs.rotation.Run(ctx)
		case <-ctx.Done():
		}
	})
	if store.failed != nil { // the embedded one
		n := nightly{s.dir.path, s.opts.Release, s.opts.BackupKeep, store.endpoints, s.log, time.Now()}
		wg.Go(func() { n.run(ctx) })
	}
	wg.Go(func() {
		select {
		case <-s.ready:
			deleteEndedTokens(ctx, a.client, s.log)
		case <-ctx.Done():
		}
	})
	if store.failed != nil {
		wg.Go(func() {
			select {
			case err := <-store.failed:
				s.log.Error("the store failed; stopping", "err", err)
				cancel(err)
			case <-ctx.Done():
			}
		})
	}
	stopped := a.prepare().RunWithContext(ctx)
	// What has failed comes before what could not be stopped because of it.
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return stopped
}

func (s *Server) openStore(ctx context.Context) (*etcd, error) {
	if len(s.opts.Etcd.Servers) > 0 {
		return reachEtcd(ctx, s.opts.Etcd)
	}
	if s.peering != nil {
		if err := s.becomeMember(ctx); err != nil {
			return nil, err
		}
	}
	return startEtcd(ctx, s.dir.file("etcd"), s.opts, s.peering)
}

// alone reports whether no other server writes to the store.
func (s *Server) alone() bool { return len(s.opts.Etcd.Servers) == 0 && s.peering == nil }

// awaitReady closes ready when /readyz answers 200 and the server has caught up with r.
func (s *Server) awaitReady(ctx context.Context, r *rotation.Rotation) {
	client, err := rest.UnversionedRESTClientFor(unversioned(s.LoopbackConfig()))
	if err != nil {
		s.log.Error("cannot make the loopback client", "err", err)
		return
	}
	for {
		if err := client.Get().AbsPath("/readyz").Do(ctx).Error(); err == nil {
			r.CatchUp(ctx)
			close(s.ready)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func localAddress(bind []netip.Addr, port uint16) string {
	a := bind[0]
	for _, b := range bind {
		if b.IsLoopback() {
			a = b
			break
		}
	}
	if a.IsUnspecified() {
		if a = netip.AddrFrom4([4]byte{127, 0, 0, 1}); bind[0].Is6() {
			a = netip.IPv6Loopback()
		}
	}
	return netip.AddrPortFrom(a, port).String()
}
