// Package certs keeps the certificates of a server: it makes and renews them, writes the kubeconfigs with
// them, verifies clients by the cluster's authorities, and answers at Path.
package certs

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/svc"
)

// Users of the server's own certificates.
const (
	// UserAdmin is the user of admin.kubeconfig, in group system:masters.
	UserAdmin = "fairlead-admin"
	// UserServer is the name in the server's own certificate.
	UserServer = "fairlead-server"
)

// Times between two checks of a running server's certificates: they are read again
// from disk, as kube-apiserver does every minute, and renewed; and between two
// warnings about the authority.
const (
	maxRenewPeriod    = time.Minute
	authorityReminder = 12 * time.Hour
)

// Credentials are the certificates of a server and the files derived from them.
type Credentials struct {
	dir    string // the data directory
	PKI    *pki.Directory
	server pki.Leaf
	peer   *pki.Leaf // of the embedded etcd among several servers, nil for the only one
	url    string
	log    *slog.Logger
	now    func() time.Time

	Serving *servingCert
	Clients *ClientCAs

	refreshing sync.Mutex
	reminded   time.Time // of the authority's end; guarded by refreshing

	mu          sync.RWMutex // guards what follows
	agentClient *pki.Pair
	node        string     // the node in this process, if there is one
	report      pki.Report // of the last refresh without an error
}

// New opens pki/ in the data directory and creates missing files in it, for a server with the given names that
// clients reach at url. The new certificates are valid for life.
func New(
	dir string, names Names, url string, life time.Duration, now func() time.Time, log *slog.Logger,
) (*Credentials, error) {
	p, err := pki.Open(filepath.Join(dir, "pki"), now)
	if err != nil {
		return nil, err
	}
	p.Life = life
	join.ReloadWithin(life)
	c := &Credentials{
		dir: dir, PKI: p, url: url, now: now, log: log, Serving: &servingCert{}, Clients: &ClientCAs{},
		server: pki.Leaf{Name: "server", CommonName: UserServer, DNSNames: names.dns, IPs: names.ips},
	}
	if names.Peer {
		c.peer = &pki.Leaf{Name: members.PeerLeaf, CommonName: UserServer, DNSNames: []string{members.PeerName}, Peer: true}
	}
	return c, c.Refresh()
}

func (c *Credentials) file(name string) string { return filepath.Join(c.dir, name) }

// Refresh reads all certificates from disk, makes or renews whatever needs it, and
// rewrites the files that hold renewed certificates. One that cannot be used does not
// keep the others from being renewed.
func (c *Credentials) Refresh() error {
	c.refreshing.Lock()
	defer c.refreshing.Unlock()
	return c.refreshLocked()
}

func (c *Credentials) refreshLocked() error {
	if ca, now := c.PKI.Authority(), c.now(); now.Add(pki.RenewBefore).After(ca.NotAfter) && now.Sub(c.reminded) >= authorityReminder {
		c.reminded = now
		c.log.Warn("the cluster's authority expires soon: 'fairlead certs rotate-ca' replaces it while everything runs",
			"file", c.file("pki/ca.crt"), "expires", ca.NotAfter)
	}
	c.mu.RLock()
	node := c.node
	c.mu.RUnlock()
	bundle := c.PKI.Bundle()
	c.Clients.set(bundle)
	errs := []error{
		c.refreshServing(),
		c.refreshKubeconfig("admin.kubeconfig", adminLeaf()),
		c.refreshKubeconfig("controllers.kubeconfig", controllersLeaf()),
	}
	agentClient, err := c.PKI.Ensure(agentClientLeaf())
	if errs = append(errs, err); err == nil {
		c.mu.Lock()
		c.agentClient = agentClient
		c.mu.Unlock()
	}
	if node != "" {
		_, err := c.PKI.Ensure(nodeLeaf(node))
		errs = append(errs, err)
	}
	if c.peer != nil { // etcd reads the files for every connection
		_, err := c.PKI.Ensure(*c.peer)
		errs = append(errs, err)
	}
	if err = errors.Join(errs...); err == nil {
		c.mu.Lock()
		c.report = bundle.Report(c.Serving.leaf())
		c.mu.Unlock()
	}
	return err
}

func (c *Credentials) refreshServing() error {
	server, err := c.PKI.Ensure(c.server)
	if err != nil {
		return err
	}
	if !c.Serving.set(server) {
		return nil
	}
	for _, name := range c.server.DNSNames {
		if server.Leaf.VerifyHostname(name) != nil {
			c.log.Warn("the provided certificate of the server lacks a name; clients cannot verify the server by it",
				"name", name, "file", c.file("pki/server.crt"))
			break
		}
	}
	return nil
}

func (c *Credentials) refreshKubeconfig(file string, l pki.Leaf) error {
	p, err := c.PKI.Ensure(l)
	if err != nil {
		return err
	}
	return c.writeKubeconfig(file, p)
}

// renew makes the certificates of these names in pki/ new, or all without names.
func (c *Credentials) renew(names []string) error {
	c.refreshing.Lock()
	defer c.refreshing.Unlock()
	leaves := c.leaves()
	known := func(name string) bool {
		return slices.ContainsFunc(leaves, func(l pki.Leaf) bool { return l.Name == name })
	}
	if i := slices.IndexFunc(names, func(name string) bool { return !known(name) }); i >= 0 {
		return fmt.Errorf("this server has no certificate %q; nodes renew theirs themselves", names[i])
	}
	for _, l := range leaves {
		if len(names) > 0 && !slices.Contains(names, l.Name) {
			continue
		}
		if err := c.PKI.Renew(l); err != nil {
			return err
		}
	}
	return c.refreshLocked()
}

// leaves returns the certificates of pki/ that this server keeps.
func (c *Credentials) leaves() []pki.Leaf {
	out := []pki.Leaf{c.server, adminLeaf(), controllersLeaf(), agentClientLeaf()}
	if c.peer != nil {
		out = append(out, *c.peer)
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.node != "" {
		out = append(out, nodeLeaf(c.node))
	}
	return out
}

func adminLeaf() pki.Leaf {
	return pki.Leaf{Name: "admin", CommonName: UserAdmin, Groups: []string{user.SystemPrivilegedGroup}}
}

func agentClientLeaf() pki.Leaf { return pki.Leaf{Name: "agent-client", CommonName: svc.ServerUser} }

// Report returns what this server reports about its certificates to the others, without the ones that its etcd trusts.
func (c *Credentials) Report() pki.Report {
	r := c.reported()
	r.Seen, r.SeenPartial = c.Clients.since(time.Now().Add(-c.seenWithin()))
	return r
}

// reported returns what this server trusts, and by whom all its certificates are signed.
func (c *Credentials) reported() pki.Report {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.report
}

// Run renews certificates until ctx is done.
func (c *Credentials) Run(ctx context.Context) {
	last := ""
	wait.UntilWithContext(ctx, func(context.Context) {
		text := ""
		if err := c.Refresh(); err != nil {
			text = err.Error()
		}
		if text != "" && text != last {
			c.log.Error("cannot read or renew the certificates; retrying", "err", text, "after", c.renewPeriod())
		}
		last = text
	}, c.renewPeriod())
}

func (c *Credentials) renewPeriod() time.Duration { return min(maxRenewPeriod, c.PKI.Life/10) }

// writeKubeconfig writes a kubeconfig (mode 0600) with p as the user, unless the
// file has that content.
func (c *Credentials) writeKubeconfig(name string, p *pki.Pair) error {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["fairlead"] = &clientcmdapi.Cluster{Server: c.url, CertificateAuthorityData: c.PKI.AuthoritiesPEM()}
	cfg.AuthInfos["fairlead"] = &clientcmdapi.AuthInfo{ClientCertificateData: p.Cert, ClientKeyData: p.Key}
	cfg.Contexts["fairlead"] = &clientcmdapi.Context{Cluster: "fairlead", AuthInfo: "fairlead"}
	cfg.CurrentContext = "fairlead"
	data, err := clientcmd.Write(*cfg)
	if err != nil {
		return err
	}
	file := c.file(name)
	if old, err := os.ReadFile(file); err == nil && slices.Equal(old, data) {
		return nil
	}
	if err := fileio.Replace(file, data, 0o600); err != nil {
		return fmt.Errorf("cannot write %s: %w", file, err)
	}
	return nil
}

func controllersLeaf() pki.Leaf {
	return pki.Leaf{Name: "controllers", CommonName: svc.ControllersUser, Groups: []string{svc.ControllersGroup}}
}

// ControllersConfig returns the configuration of the controllers' client.
func (c *Credentials) ControllersConfig() *rest.Config { return c.clientConfig(controllersLeaf()) }

// clientConfig returns the configuration of a client with a certificate of pki/. The
// client reads the files again when they change.
func (c *Credentials) clientConfig(l pki.Leaf) *rest.Config {
	file := c.file("pki/" + l.Name + ".crt")
	return &rest.Config{Host: c.url, TLSClientConfig: rest.TLSClientConfig{
		CAFile: c.file("pki/ca.crt"), CertFile: file, KeyFile: pki.KeyFile(file),
	}}
}

// nodeLeaf describes the certificate of the node in this process.
func nodeLeaf(name string) pki.Leaf {
	return pki.Leaf{Name: "node", CommonName: svc.NodeUserPrefix + name, Groups: []string{user.NodesGroup}}
}

// NodeConfig returns the configuration of a client that authenticates as the named
// node.
func (c *Credentials) NodeConfig(name string) (*rest.Config, error) {
	c.refreshing.Lock()
	_, err := c.PKI.Ensure(nodeLeaf(name))
	c.refreshing.Unlock()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.node = name
	return c.clientConfig(nodeLeaf(name)), nil
}

// OwnNode returns the name of the node in this process, "" if there is none.
func (c *Credentials) OwnNode() string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.node
}

// AgentCertificate returns the client certificate of the server at agents.
func (c *Credentials) AgentCertificate() (*tls.Certificate, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	pair, err := tls.X509KeyPair(c.agentClient.Cert, c.agentClient.Key)
	return &pair, err
}

// Token returns the join token in the file node-token; the zero Token if there is
// none, or one of another authority (ca.crt was replaced) or of an earlier release.
func (c *Credentials) Token() (join.Token, error) {
	file := c.file("node-token")
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return join.Token{}, nil
	}
	if err != nil {
		return join.Token{}, err
	}
	t, err := join.Parse(string(data))
	switch {
	case errors.Is(err, join.ErrOldForm):
		c.log.Warn("the join token is of an earlier release; nodes that join need the new one", "file", file)
		return join.Token{}, nil
	case err != nil:
		return join.Token{}, fmt.Errorf("%s: %w; remove the file to have a new one made", file, err)
	case t.Hash != pki.Hash(c.PKI.Authority()):
		c.log.Warn("the authority was replaced; nodes need the new join token", "file", file)
		return join.Token{}, nil
	}
	return t, nil
}

// Names are the names and addresses in the server's certificate.
type Names struct {
	dns []string
	ips []net.IP
	// Peer is set for one of several servers with embedded etcds.
	Peer bool
}

// NamesFor returns the names of a server that is reached at addrs, with further DNS names.
func NamesFor(further []string, addrs []netip.Addr) Names {
	n := Names{dns: []string{
		"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
	}}
	if h, err := os.Hostname(); err == nil && h != "localhost" {
		n.dns = append(n.dns, h)
	}
	for _, name := range further {
		if !slices.Contains(n.dns, name) {
			n.dns = append(n.dns, name)
		}
	}
	add := func(a netip.Addr) {
		if a.IsValid() && !a.IsUnspecified() && !slices.ContainsFunc(n.ips, net.IP(a.AsSlice()).Equal) {
			n.ips = append(n.ips, net.IP(a.WithZone("").AsSlice()))
		}
	}
	add(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	add(netip.IPv6Loopback())
	for _, a := range addrs {
		add(a)
	}
	return n
}

// servingCert is the serving certificate, which can change while the server runs.
type servingCert struct {
	mu        sync.RWMutex
	pair      *pki.Pair
	listeners []dynamiccertificates.Listener
}

var _ dynamiccertificates.CertKeyContentProvider = (*servingCert)(nil)

func (*servingCert) Name() string { return "server" }

func (s *servingCert) CurrentCertKeyContent() ([]byte, []byte) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.pair.Cert, s.pair.Key
}

func (s *servingCert) AddListener(l dynamiccertificates.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listeners = append(s.listeners, l)
}

// set makes p the certificate, and reports whether it was another one before.
func (s *servingCert) set(p *pki.Pair) bool {
	s.mu.Lock()
	if s.pair != nil && bytes.Equal(s.pair.Cert, p.Cert) && bytes.Equal(s.pair.Key, p.Key) {
		s.mu.Unlock()
		return false
	}
	s.pair = p
	listeners := slices.Clone(s.listeners)
	s.mu.Unlock()
	for _, l := range listeners {
		l.Enqueue()
	}
	return true
}

// leaf returns the certificate.
func (s *servingCert) leaf() *x509.Certificate {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.pair.Leaf
}

// ServerName returns a name that the certificate is valid for, for clients in this
// process that connect to an address.
func (s *servingCert) ServerName() string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if len(s.pair.Leaf.DNSNames) > 0 {
		return s.pair.Leaf.DNSNames[0]
	}
	return ""
}
