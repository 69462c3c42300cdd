package apiserver

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
)

// Times between two checks of a running server's certificates: they are read again
// from disk, as kube-apiserver does every minute, and renewed; and between two
// warnings about the authority.
const (
	maxRenewPeriod    = time.Minute
	authorityReminder = 12 * time.Hour
)

// peerLeaf is the file name, without extension, of the certificate with which the embedded etcds of
// several servers know each other.
const peerLeaf = "etcd-peer"

// credentials are the certificates of a server and the files derived from them.
type credentials struct {
	dir    *dataDir
	pki    *pki.Directory
	server pki.Leaf
	peer   *pki.Leaf // of the embedded etcd among several servers, nil for the only one
	url    string
	log    *slog.Logger
	now    func() time.Time

	serving *servingCert
	clients *clientCAs

	refreshing sync.Mutex
	reminded   time.Time // of the authority's end; guarded by refreshing

	mu          sync.RWMutex // guards what follows
	agentClient *pki.Pair
	node        string     // the node in this process, if there is one
	report      pki.Report // of the last refresh without an error
}

// newCredentials opens pki/ in the data directory and makes what is missing in
// it, for a server with the given names that clients reach at url. The certificates
// made are valid for life.
func newCredentials(
	dir *dataDir, names serverNames, url string, life time.Duration, now func() time.Time, log *slog.Logger,
) (*credentials, error) {
	p, err := pki.Open(dir.file("pki"), now)
	if err != nil {
		return nil, err
	}
	p.Life = life
	join.ReloadWithin(life)
	c := &credentials{
		dir: dir, pki: p, url: url, now: now, log: log, serving: &servingCert{}, clients: &clientCAs{},
		server: pki.Leaf{Name: "server", CommonName: userServer, DNSNames: names.dns, IPs: names.ips},
	}
	if names.peer {
		c.peer = &pki.Leaf{Name: peerLeaf, CommonName: userServer, DNSNames: []string{members.PeerName}, Peer: true}
	}
	return c, c.refresh()
}

// refresh reads all certificates from disk, makes or renews whatever needs it, and
// rewrites the files that hold renewed certificates. One that cannot be used does not
// keep the others from being renewed.
func (c *credentials) refresh() error {
	c.refreshing.Lock()
	defer c.refreshing.Unlock()
	return c.refreshLocked()
}

func (c *credentials) refreshLocked() error {
	if ca, now := c.pki.Authority(), c.now(); now.Add(pki.RenewBefore).After(ca.NotAfter) && now.Sub(c.reminded) >= authorityReminder {
		c.reminded = now
		c.log.Warn("the cluster's authority expires soon: 'fairlead certs rotate-ca' replaces it while everything runs",
			"file", c.dir.file("pki/ca.crt"), "expires", ca.NotAfter)
	}
	c.mu.RLock()
	node := c.node
	c.mu.RUnlock()
	bundle := c.pki.Bundle()
	c.clients.set(bundle)
	errs := []error{
		c.refreshServing(),
		c.refreshKubeconfig("admin.kubeconfig", adminLeaf()),
		c.refreshKubeconfig("controllers.kubeconfig", controllersLeaf()),
	}
	agentClient, err := c.pki.Ensure(agentClientLeaf())
	if errs = append(errs, err); err == nil {
		c.mu.Lock()
		c.agentClient = agentClient
		c.mu.Unlock()
	}
	if node != "" {
		_, err := c.pki.Ensure(nodeLeaf(node))
		errs = append(errs, err)
	}
	if c.peer != nil { // etcd reads the files for every connection
		_, err := c.pki.Ensure(*c.peer)
		errs = append(errs, err)
	}
	if err = errors.Join(errs...); err == nil {
		c.mu.Lock()
		c.report = bundle.Report(c.serving.leaf())
		c.mu.Unlock()
	}
	return err
}

func (c *credentials) refreshServing() error {
	server, err := c.pki.Ensure(c.server)
	if err != nil {
		return err
	}
	if !c.serving.set(server) {
		return nil
	}
	for _, name := range c.server.DNSNames {
		if server.Leaf.VerifyHostname(name) != nil {
			c.log.Warn("the provided certificate of the server lacks a name; clients cannot verify the server by it",
				"name", name, "file", c.dir.file("pki/server.crt"))
			break
		}
	}
	return nil
}

func (c *credentials) refreshKubeconfig(file string, l pki.Leaf) error {
	p, err := c.pki.Ensure(l)
	if err != nil {
		return err
	}
	return c.writeKubeconfig(file, p)
}

// renew makes the certificates of these names in pki/ new, or all without names.
func (c *credentials) renew(names []string) error {
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
		if err := c.pki.Renew(l); err != nil {
			return err
		}
	}
	return c.refreshLocked()
}

// leaves returns the certificates of pki/ that this server keeps.
func (c *credentials) leaves() []pki.Leaf {
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
	return pki.Leaf{Name: "admin", CommonName: userAdmin, Groups: []string{user.SystemPrivilegedGroup}}
}

func agentClientLeaf() pki.Leaf { return pki.Leaf{Name: "agent-client", CommonName: UserAgentClient} }

// reported returns what this server trusts, and by whom all its certificates are signed.
func (c *credentials) reported() pki.Report {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.report
}

// run renews certificates until ctx is done.
func (c *credentials) run(ctx context.Context) {
	last := ""
	wait.UntilWithContext(ctx, func(context.Context) {
		text := ""
		if err := c.refresh(); err != nil {
			text = err.Error()
		}
		if text != "" && text != last {
			c.log.Error("cannot read or renew the certificates; retrying", "err", text, "after", c.renewPeriod())
		}
		last = text
	}, c.renewPeriod())
}

func (c *credentials) renewPeriod() time.Duration { return min(maxRenewPeriod, c.pki.Life/10) }

// writeKubeconfig writes a kubeconfig (mode 0600) with p as the user, unless the
// file has that content.
func (c *credentials) writeKubeconfig(name string, p *pki.Pair) error {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["fairlead"] = &clientcmdapi.Cluster{Server: c.url, CertificateAuthorityData: c.pki.AuthoritiesPEM()}
	cfg.AuthInfos["fairlead"] = &clientcmdapi.AuthInfo{ClientCertificateData: p.Cert, ClientKeyData: p.Key}
	cfg.Contexts["fairlead"] = &clientcmdapi.Context{Cluster: "fairlead", AuthInfo: "fairlead"}
	cfg.CurrentContext = "fairlead"
	data, err := clientcmd.Write(*cfg)
	if err != nil {
		return err
	}
	file := c.dir.file(name)
	if old, err := os.ReadFile(file); err == nil && slices.Equal(old, data) {
		return nil
	}
	if err := fileio.Replace(file, data, 0o600); err != nil {
		return fmt.Errorf("cannot write %s: %w", file, err)
	}
	return nil
}

func controllersLeaf() pki.Leaf {
	return pki.Leaf{Name: "controllers", CommonName: UserControllers, Groups: []string{GroupControllers}}
}

// controllersConfig returns the configuration of the controllers' client.
func (c *credentials) controllersConfig() *rest.Config { return c.clientConfig(controllersLeaf()) }

// clientConfig returns the configuration of a client with a certificate of pki/. The
// client reads the files again when they change.
func (c *credentials) clientConfig(l pki.Leaf) *rest.Config {
	file := c.dir.file("pki/" + l.Name + ".crt")
	return &rest.Config{Host: c.url, TLSClientConfig: rest.TLSClientConfig{
		CAFile: c.dir.file("pki/ca.crt"), CertFile: file, KeyFile: pki.KeyFile(file),
	}}
}

// nodeLeaf describes the certificate of the node in this process.
func nodeLeaf(name string) pki.Leaf {
	return pki.Leaf{Name: "node", CommonName: nodePrefix + name, Groups: []string{user.NodesGroup}}
}

// nodeConfig returns the configuration of a client that authenticates as the named
// node.
func (c *credentials) nodeConfig(name string) (*rest.Config, error) {
	c.refreshing.Lock()
	_, err := c.pki.Ensure(nodeLeaf(name))
	c.refreshing.Unlock()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.node = name
	return c.clientConfig(nodeLeaf(name)), nil
}

// agentCertificate returns the client certificate of the server at agents.
func (c *credentials) agentCertificate() (*tls.Certificate, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	pair, err := tls.X509KeyPair(c.agentClient.Cert, c.agentClient.Key)
	return &pair, err
}

// token returns the join token in the file node-token; the zero Token if there is
// none, or one of another authority (ca.crt was replaced) or of an earlier release.
func (c *credentials) token() (join.Token, error) {
	file := c.dir.file("node-token")
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
	case t.Hash != pki.Hash(c.pki.Authority()):
		c.log.Warn("the authority was replaced; nodes need the new join token", "file", file)
		return join.Token{}, nil
	}
	return t, nil
}

// serverNames are the names and addresses in the server's certificate.
type serverNames struct {
	dns []string
	ips []net.IP
	// peer is set for one of several servers with embedded etcds.
	peer bool
}

func namesFor(o Options) serverNames {
	n := serverNames{dns: []string{
		"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
	}}
	if h, err := os.Hostname(); err == nil && h != "localhost" {
		n.dns = append(n.dns, h)
	}
	for _, name := range o.Names {
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
	for _, a := range o.BindAddresses {
		add(a)
	}
	add(o.AdvertiseAddress)
	for _, c := range o.ServiceCIDRs {
		add(c.Addr().Next())
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

// name returns a name that the certificate is valid for, for clients in this
// process that connect to an address.
func (s *servingCert) name() string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if len(s.pair.Leaf.DNSNames) > 0 {
		return s.pair.Leaf.DNSNames[0]
	}
	return ""
}
