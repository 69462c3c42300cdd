// Package store keeps the objects of the API in etcd: embedded in the server, by itself or as a member among
// several servers, or an external cluster. It watches the embedded etcd's space and disk,
// locks the data directory, and backs it up and restores it.
package store

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	// etcdStartReport is how often an embedded etcd is named that is not ready yet.
	etcdStartReport = 30 * time.Second
	// etcdDialTimeout bounds the first answer of an external etcd.
	etcdDialTimeout = 5 * time.Second
	// maxSocketPath is the longest path a unix socket may have (unix(7)).
	maxSocketPath = 107
)

// DefaultPrefix is the path below which the keys of the API lie.
const DefaultPrefix = "/registry"

// Store is the store: the embedded one, or an external cluster.
type Store struct {
	Endpoints []string
	// Dial makes the connections to the endpoints; nil for plain ones.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	Stop func()
	// Failed receives the embedded etcd's fatal error; nil for an external one.
	Failed <-chan error
	// Space keeps the embedded etcd below its quota; nil for an external one.
	Space *Space
	// embedded is nil for an external one.
	embedded *embedded
	holdings *holdings
}

// External is an etcd cluster that this server does not run.
type External struct {
	// Servers are client URLs such as https://192.0.2.1:2379. None means that
	// the embedded etcd is used.
	Servers []string
	// CAFile, CertFile and KeyFile are the TLS files of a client, PEM, for servers
	// that begin with https; they are read again for every connection.
	CAFile, CertFile, KeyFile string
	// Prefix is the path below which all keys lie; default DefaultPrefix.
	Prefix string
}

// Options configure the embedded etcd.
type Options struct {
	// Quota is the size in bytes at which it counts as full and rejects writes of users.
	Quota int64
	// Prefix is the path below which all keys of the API lie; default DefaultPrefix.
	Prefix string
	// UnsafeNoFsync makes it lose acknowledged writes when the machine crashes. For tests.
	UnsafeNoFsync bool
	Log           *slog.Logger

	// forceNewCluster makes it forget its other members. For copies of a store.
	forceNewCluster bool
}

// Start starts the embedded etcd in dir. For clients it only listens on a unix socket in dir, which only this
// user can enter. p is nil for the only server.
func Start(ctx context.Context, dir string, o Options, p *Peering) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	socket, release, err := socketPath(dir)
	if err != nil {
		return nil, err
	}
	setSegmentSize()
	m := &embedded{dir: dir, socket: socket, opts: o, peering: p, failed: make(chan error, 1)}
	m.space = newSpace(m.server, dir, cmp.Or(o.Prefix, DefaultPrefix), o.Quota, o.Log)
	if err = prepareDisk(dir); err == nil {
		if err = checkStore(filepath.Join(dir, "member", "snap", "db")); err != nil {
			err = damaged(dir, err)
		}
	}
	if err == nil {
		err = m.start(ctx)
	}
	if err != nil {
		release()
		return nil, err
	}
	return &Store{
		Endpoints: []string{"unix://" + socket}, Dial: m.dial, Stop: func() { m.stop(); release() },
		Failed: m.failed, Space: m.space, embedded: m, holdings: m.space.holdings,
	}, nil
}

func etcdConfig(dir, socket string, o Options, f etcdFailures) *embed.Config {
	c := embed.NewConfig()
	c.Name = "fairlead"
	c.Dir = dir
	c.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	c.AdvertiseClientUrls = c.ListenClientUrls
	// The only member has no peers: it listens for none, and the address it is
	// registered under is never dialled.
	c.ListenPeerUrls = nil
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	c.InitialClusterToken = newClusterToken()
	// The start waits for an election, which can be short: without peers no tick
	// crosses a network.
	c.TickMs, c.ElectionMs = 20, 100
	c.QuotaBackendBytes = hardQuota(o.Quota)
	// The API server compacts every five minutes, space by size; this is a fallback.
	c.AutoCompactionMode, c.AutoCompactionRetention = embed.CompactorModePeriodic, "1h"
	// The log kept in memory for followers, of which there are none.
	c.SnapshotCount, c.SnapshotCatchUpEntries = snapshotCount, 100
	c.UnsafeNoFsync, c.ForceNewCluster = o.UnsafeNoFsync, o.forceNewCluster
	c.EnableGRPCGateway = false
	core := zapToSlog{log: o.Log.With("component", "etcd"), slow: &slowDisk{dir: dir, log: o.Log}, failures: f}
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(
		zap.New(core, zap.WithFatalHook(f), zap.WithPanicHook(f)))
	return c
}

// EtcdServer returns the embedded etcd of the last start.
func (e *Store) EtcdServer() *etcdserver.EtcdServer { return e.embedded.server() }

// Servers returns the addresses of the API servers of all members. For members that have not started it returns
// the addresses of their etcds.
func (e *Store) Servers() []string { return e.embedded.peering.servers(e.embedded.server()) }

// CheckLeader returns an error while the members have no leader.
func (e *Store) CheckLeader() error { return e.embedded.peering.checkLeader(e.embedded.server()) }

// Restart starts the embedded etcd of one of several servers again, which then trusts the authorities of this
// moment. A leader hands over first, to a server of which first reports true for its URL if there is one. The error is
// that of an etcd that goes on as it was; one that does not start again fails the server.
func (e *Store) Restart(ctx context.Context, first func(server string) bool) error {
	return e.embedded.restart(ctx, first)
}

// socketPath returns a path for the socket in dir and what releases it. In place of
// a path too long for a socket it is one through a descriptor of dir.
func socketPath(dir string) (string, func(), error) {
	p := filepath.Join(dir, "client.sock")
	if len(p) <= maxSocketPath {
		return p, func() {}, nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/client.sock", d.Fd()), func() { d.Close() }, nil
}

// Reach checks that an external etcd answers, and follows what namespaces take of it until Stop is called.
func Reach(ctx context.Context, o External, log *slog.Logger) (*Store, error) {
	within, cancel := context.WithTimeout(ctx, etcdDialTimeout)
	defer cancel()
	store := &Store{Endpoints: o.Servers}
	if o.secure() {
		if _, err := o.tls(); err != nil {
			return nil, err
		}
		store.Endpoints, store.Dial = o.plain(), o.dial
	}
	client, err := store.client(context.WithoutCancel(ctx))
	if err != nil {
		return nil, fmt.Errorf("--etcd-servers: %w", err)
	}
	if _, err := client.Get(within, o.Prefix+"/health"); err != nil {
		_ = client.Close()
		return nil, fmt.Errorf("etcd at %v cannot be reached: %w; start it, or correct --etcd-servers and its certificates", o.Servers, err)
	}
	store.holdings, store.Stop = share(ctx, client, store.Endpoints, cmp.Or(o.Prefix, DefaultPrefix), log)
	return store, nil
}

// secure reports whether all servers are reached by TLS.
func (o External) secure() bool {
	return !slices.ContainsFunc(o.Servers, func(s string) bool { return !strings.HasPrefix(s, "https://") })
}

// plain returns the URLs for a client that gets its connections from dial.
func (o External) plain() (urls []string) {
	for _, s := range o.Servers {
		urls = append(urls, "http://"+strings.TrimPrefix(s, "https://"))
	}
	return urls
}

func (o External) tls() (*tls.Config, error) {
	c, err := transport.TLSInfo{CertFile: o.CertFile, KeyFile: o.KeyFile, TrustedCAFile: o.CAFile}.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("cannot use the TLS files for etcd: %w", err)
	}
	return c, nil
}

// dial makes a connection with the TLS files as they are now: etcd's client reads the
// authorities once, and would reject servers for good when theirs is replaced.
func (o External) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	config, err := o.tls()
	if err != nil {
		return nil, err
	}
	config.NextProtos = []string{"h2"} // gRPC requires it
	return (&tls.Dialer{Config: config}).DialContext(ctx, network, addr)
}

// zapToSlog passes etcd's messages to the server's log. Warnings become debug
// messages: most are about etcd's own command line. Those of a slow disk go to slow.
type zapToSlog struct {
	log      *slog.Logger
	slow     *slowDisk
	failures etcdFailures
	fields   []zapcore.Field
}

func (z zapToSlog) Enabled(l zapcore.Level) bool {
	return l == zapcore.WarnLevel || z.log.Enabled(context.Background(), slogLevel(l))
}

func (z zapToSlog) With(f []zapcore.Field) zapcore.Core {
	return zapToSlog{z.log, z.slow, z.failures, append(z.fields[:len(z.fields):len(z.fields)], f...)}
}

func (z zapToSlog) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if z.Enabled(e.Level) {
		return c.AddCore(e, z)
	}
	return c
}

func (z zapToSlog) Write(e zapcore.Entry, f []zapcore.Field) error {
	if e.Message == slowSync {
		z.slow.synced(f)
	}
	enc := zapcore.NewMapObjectEncoder()
	for _, x := range append(z.fields[:len(z.fields):len(z.fields)], f...) {
		x.AddTo(enc)
	}
	attrs := make([]any, 0, 2*len(enc.Fields))
	for k, v := range enc.Fields {
		attrs = append(attrs, k, v)
	}
	level := slogLevel(e.Level)
	switch {
	case e.Message == "setting up serving from embedded etcd failed.", // the end of every stop
		e.Message == "failed to update storage version", // the first second of a new store
		z.failures.harmless(e.Message):
		level = slog.LevelDebug
	}
	z.log.Log(context.Background(), level, e.Message, attrs...)
	return nil
}

func (zapToSlog) Sync() error { return nil }

func slogLevel(l zapcore.Level) slog.Level {
	switch {
	case l >= zapcore.ErrorLevel:
		return slog.LevelError
	case l >= zapcore.WarnLevel:
		return slog.LevelDebug
	}
	return slog.LevelDebug - 4
}
