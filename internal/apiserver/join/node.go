package join

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	certificatesclient "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// Times of a node's certificate.
const (
	// issueTimeout is how long a node waits for its certificate. A machine that
	// takes over the name of another one waits until the other's Node is deleted and
	// its Lease has expired.
	issueTimeout = 2 * time.Minute
	issuePoll    = 50 * time.Millisecond
	issueWarning = 5 * time.Second // until a wait is logged
	// startTimeout is how long a server that has just started may reject a valid
	// token: its roles are being made.
	startTimeout = 15 * time.Second
	// maxPause is the longest time between two looks at the clock, which may be set.
	maxPause = time.Hour
	// closing is a bound of the time from a look for new certificate files to the end of the connections with the old one.
	closing = time.Second
)

// ReloadWithin lets the clients of this process look often enough for new
// certificate files when certificates live for life only. It must be called before
// the first client is made. client-go looks every 5 minutes and has only this
// variable of the process to change that (transport.CertCallbackRefreshDuration).
func ReloadWithin(life time.Duration) {
	if period := life / 10; period < transport.CertCallbackRefreshDuration {
		transport.CertCallbackRefreshDuration = period
	}
}

// Node is the identity of one node: a certificate only for its name, in a
// directory of its machine.
//
// It is not a certificate.Manager of k8s.io/client-go (v0.37): that one reports
// only through klog, waits 15 minutes for a signature without a message, and does not explain why a
// certificate on disk is unusable. The operator of a machine that is
// to join needs to know after seconds that the name is in use or that the request
// has to be approved, and how.
type Node struct {
	name, dir string
	host      string
	log       *slog.Logger
	use       func(*rest.Config)
	changed   loop.Signal

	mu      sync.Mutex
	ca      []byte    // the trusted authorities, the signing one first
	settled time.Time // when the last connection with the certificate before this one is closed, zero without one
}

// Use has the clients made from later results of Config, and that of renewals, set up by
// use: to choose among several servers.
func (n *Node) Use(use func(*rest.Config)) { n.use = use }

// Open returns the identity of the node name at server that NewNode has kept in dir.
// The error is fs.ErrNotExist if the machine has never joined.
func Open(server, name, dir string, log *slog.Logger) (*Node, error) {
	n := &Node{name: name, dir: dir, host: server, log: log, changed: loop.NewSignal()}
	var err error
	if n.ca, err = os.ReadFile(n.file("ca.crt")); err != nil {
		return nil, err
	}
	return n, n.open()
}

// open checks the certificate and prepares clients for its life.
func (n *Node) open() error {
	if err := n.check(); err != nil {
		return err
	}
	leaf, err := n.leaf()
	if err == nil {
		ReloadWithin(leaf.NotAfter.Sub(leaf.NotBefore))
	}
	return err
}

// Of reports whether the node belongs to the cluster of a token.
func (n *Node) Of(token string) bool {
	t, err := Parse(token)
	return err == nil && pki.HasHash(n.ca, t.Hash)
}

// NewNode returns the identity of the node name at the server that boot leads
// to, kept in dir. If there is none, it requests a certificate with boot.
func NewNode(ctx context.Context, boot *rest.Config, name, dir string, log *slog.Logger) (*Node, error) {
	return newNode(boot, name, dir, log, func(n *Node) error { return n.issue(ctx, boot) })
}

// newNode opens the identity of the node name in dir; if there is none, issue makes it.
func newNode(boot *rest.Config, name, dir string, log *slog.Logger, issue func(*Node) error) (*Node, error) {
	n := &Node{name: name, dir: dir, ca: boot.CAData, host: boot.Host, log: log, changed: loop.NewSignal()}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("the node's certificate: %w", err)
	}
	if err := n.check(); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.Info("the node's certificate is not usable; requesting a new one", "file", n.file("node.crt"), "err", err)
		}
		if err := issue(n); err != nil {
			return nil, err
		}
	}
	if err := fileio.Replace(n.file("ca.crt"), n.ca, 0o600); err != nil {
		return nil, fmt.Errorf("the node's certificate: %w", err)
	}
	return n, n.open()
}

// Config returns the configuration of a client that authenticates as the node. It
// follows renewals of the certificate.
func (n *Node) Config() *rest.Config {
	cfg := &rest.Config{Host: n.host, TLSClientConfig: rest.TLSClientConfig{
		CAFile: n.file("ca.crt"), CertFile: n.file("node.crt"), KeyFile: n.keyFile(),
	}}
	if n.use != nil {
		n.use(cfg)
	}
	return cfg
}

// Changed holds a token when the certificate or the authorities may have changed.
func (n *Node) Changed() <-chan struct{} { return n.changed }

func (n *Node) setChanged() { n.changed.Set() }

// Run renews the certificate when a third of its life is left or another authority signs, and follows
// the authorities of the cluster, until ctx ends.
func (n *Node) Run(ctx context.Context) error {
	again := loop.NewSignal()
	var following sync.WaitGroup
	defer following.Wait()
	following.Go(func() { n.follow(ctx, again) })
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-again:
		case <-time.After(n.renew(ctx)):
		}
	}
	return nil
}

// renew renews the certificate if it is time, and returns when to call it again.
func (n *Node) renew(ctx context.Context) (pause time.Duration) {
	leaf, err := n.leaf()
	if err != nil {
		n.log.Error("cannot read the node's certificate; retrying", "err", err, "after", maxPause)
		return maxPause
	}
	life := leaf.NotAfter.Sub(leaf.NotBefore)
	if wait := time.Until(leaf.NotAfter.Add(-life / 3)); wait > 0 && n.ofSigner(leaf) {
		return min(wait, n.settle(), maxPause)
	}
	pause = min(max(life/20, time.Second), maxPause)
	err = n.issue(ctx, n.Config())
	if err == nil {
		n.replaced()
		return time.Second // look at the new one: another server may have signed it, which trusts both and is behind
	}
	if ctx.Err() == nil {
		n.log.Error("cannot renew the node's certificate; retrying", "err", err, "expires", leaf.NotAfter, "after", pause)
	}
	return pause
}

// replaced notes that connections go on with the certificate before this one until clients look for a new one.
func (n *Node) replaced() {
	n.mu.Lock()
	n.settled = time.Now().Add(transport.CertCallbackRefreshDuration + closing)
	n.mu.Unlock()
	n.setChanged()
}

// settle returns the time until Replacing changes, and tells Changed when it has.
func (n *Node) settle() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.settled.IsZero() {
		return maxPause
	}
	if wait := time.Until(n.settled); wait > 0 {
		return wait
	}
	n.settled = time.Time{}
	n.setChanged()
	return maxPause
}

// Replacing reports whether this process may still have connections with the certificate before this one. To remove
// the authority of that one now would have requests on them rejected.
func (n *Node) Replacing() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.settled.IsZero()
}

func (n *Node) file(name string) string { return filepath.Join(n.dir, name) }

// check returns why the certificate on disk cannot be used, nil if it can.
func (n *Node) check() error {
	pair, err := n.pair()
	if err != nil {
		return err
	}
	leaf, roots, rest := pair.Leaf, x509.NewCertPool(), x509.NewCertPool()
	roots.AppendCertsFromPEM(n.ca)
	for _, der := range pair.Certificate[1:] {
		if c, err := x509.ParseCertificate(der); err == nil {
			rest.AddCert(c) // the authority's, signed by the one that this node knows
		}
	}
	if leaf.Subject.CommonName != svc.NodeUserPrefix+n.name {
		return fmt.Errorf("it is for %s", leaf.Subject.CommonName)
	}
	_, err = leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: rest, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err
}

func (n *Node) leaf() (*x509.Certificate, error) {
	pair, err := n.pair()
	return pair.Leaf, err
}

func (n *Node) pair() (tls.Certificate, error) {
	return tls.LoadX509KeyPair(n.file("node.crt"), n.keyFile())
}

// keyFile returns the file with the key of the certificate. Earlier versions only wrote it into node.key.
func (n *Node) keyFile() string { return pki.KeyFile(n.file("node.crt")) }

// issue requests a new certificate as cfg and writes it.
func (n *Node) issue(ctx context.Context, cfg *rest.Config) error {
	ctx, cancel := context.WithTimeout(ctx, issueTimeout)
	defer cancel()
	key, keyPEM, err := pki.NewKey()
	if err != nil {
		return err
	}
	spec, err := n.spec(key)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	cert, err := n.request(ctx, client, spec)
	if err != nil {
		return fmt.Errorf("no certificate for node %s: %w", n.name, err)
	}
	return n.keep(cert, keyPEM)
}

// spec returns the request for a certificate of key.
func (n *Node) spec(key crypto.Signer) (spec certificatesv1.CertificateSigningRequestSpec, err error) {
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: svc.NodeUserPrefix + n.name, Organization: []string{svc.NodesGroup}},
	}, key)
	return certificatesv1.CertificateSigningRequestSpec{
		Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request}),
		SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
		Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
	}, err
}

// keep writes a certificate and its key.
func (n *Node) keep(cert, keyPEM []byte) error {
	// The key is in both: earlier versions, to which a machine may go back, read it in node.key.
	return errors.Join(
		fileio.Replace(n.file("node.crt"), append(cert, keyPEM...), 0o600),
		fileio.Replace(n.file("node.key"), keyPEM, 0o600),
	)
}

// request creates a certificate request and waits for the certificate.
func (n *Node) request(
	ctx context.Context, client kubernetes.Interface, spec certificatesv1.CertificateSigningRequestSpec,
) ([]byte, error) {
	api := client.CertificatesV1().CertificateSigningRequests()
	c, err := n.create(ctx, api, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: requestPrefix}, Spec: spec,
	})
	if err != nil {
		return nil, err
	}
	warned, failing := false, false
	for begin := time.Now(); ; {
		got, err := api.Get(ctx, c.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil, fmt.Errorf("the request %s was deleted", c.Name)
		case err != nil && ctx.Err() == nil:
			if !failing {
				n.log.Warn("cannot get the certificate request; retrying", "request", c.Name, "err", err, "every", issuePoll)
			}
			failing = true
		case err == nil && len(got.Status.Certificate) > 0:
			return got.Status.Certificate, nil
		case err == nil:
			if err := rejected(got); err != nil {
				return nil, err
			}
		}
		if !warned && time.Since(begin) > issueWarning {
			warned = true
			n.log.Warn("still waiting for this node's certificate: is there a Node of the same name? "+
				"Choose another name with --node-name, or delete that Node if its machine is gone", "node", n.name, "request", c.Name)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the request %s was not answered in time: is there a Node of that name? "+
				"Choose another name with --node-name, delete the Node if its machine is gone, "+
				"or approve the request: kubectl certificate approve %[1]s", c.Name)
		case <-time.After(issuePoll):
		}
	}
}

// rejected returns why a request will not be signed, nil if it may be.
func rejected(c *certificatesv1.CertificateSigningRequest) error {
	for _, k := range c.Status.Conditions {
		if k.Type == certificatesv1.CertificateDenied || k.Type == certificatesv1.CertificateFailed {
			return fmt.Errorf("the request %s is %s: %s: %s", c.Name, k.Type, k.Reason, k.Message)
		}
	}
	return nil
}

// create creates a request. A rejection is final only after startTimeout.
func (n *Node) create(
	ctx context.Context, api certificatesclient.CertificateSigningRequestInterface, c *certificatesv1.CertificateSigningRequest,
) (*certificatesv1.CertificateSigningRequest, error) {
	last := metav1.StatusReasonUnknown
	for begin := time.Now(); ; {
		got, err := api.Create(ctx, c, metav1.CreateOptions{})
		final := time.Since(begin) > startTimeout
		switch {
		case err == nil:
			return got, nil
		case apierrors.IsUnauthorized(err) && final:
			return nil, fmt.Errorf("%w: the token has expired or was revoked; make one with 'fairlead token create'", err)
		case final || !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) && !apierrors.IsServiceUnavailable(err):
			return nil, err
		}
		if reason := apierrors.ReasonForError(err); reason != last {
			last = reason
			n.log.Warn("the server rejects the request for this node's certificate; it may have just started: retrying, then giving up",
				"node", n.name, "err", err, "for", startTimeout)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(issuePoll):
		}
	}
}
