package certs

import (
	"bytes"
	"crypto/x509"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	requestx509 "k8s.io/apiserver/pkg/authentication/request/x509"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxSeen bounds how many users with a certificate of an authority that goes are remembered.
const maxSeen = 64

// ClientCAs are the authorities by which clients' certificates are verified. They change
// while the server runs.
type ClientCAs struct {
	mu        sync.RWMutex
	pem       []byte
	opts      x509.VerifyOptions
	listeners []dynamiccertificates.Listener
	direct    bool                 // the authorities sign clients' certificates themselves
	others    [][]byte             // the key IDs of the authorities that do not sign
	seen      map[string]time.Time // when a user was last recognised by a certificate of one of those
	began     time.Time            // since when seen is kept
}

var _ dynamiccertificates.CAContentProvider = (*ClientCAs)(nil)

// Name names the authorities in logs.
func (*ClientCAs) Name() string { return "cluster-authority" }

// CurrentCABundleContent returns the authorities in PEM.
func (c *ClientCAs) CurrentCABundleContent() []byte {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.pem
}

// VerifyOptions returns how to verify a client; ok is false without an authority.
func (c *ClientCAs) VerifyOptions() (x509.VerifyOptions, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.opts, c.opts.Roots != nil
}

// AddListener has l called after each change.
func (c *ClientCAs) AddListener(l dynamiccertificates.Listener) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listeners = append(c.listeners, l)
}

func (c *ClientCAs) set(b *pki.Bundle) {
	text := b.PEM()
	c.mu.Lock()
	if bytes.Equal(c.pem, text) {
		c.mu.Unlock()
		return
	}
	c.pem, c.opts, c.others = text, requestx509.DefaultVerifyOptions(), nil
	c.seen, c.began = map[string]time.Time{}, time.Now()
	c.opts.Roots, c.direct = b.Pool(), b.Made()
	for _, a := range b.Authorities[1:] {
		c.others = append(c.others, a.Cert.SubjectKeyId)
	}
	listeners := slices.Clone(c.listeners)
	c.mu.Unlock()
	for _, l := range listeners {
		l.Enqueue()
	}
}

// errNotTrusted is the error of a certificate that only a cross certificate leads to an authority.
var errNotTrusted = errors.New("the certificate is of an authority that this server does not trust: get a new kubeconfig")

// users returns the users of certificates, and remembers users whose certificate is not of the authority that
// signs. Cross certificates are only for servers: by the one of a rotation which was
// aborted, all that the new authority has signed would be recognised further on.
func (c *ClientCAs) users() requestx509.UserConversion {
	return requestx509.UserConversionFunc(func(chain []*x509.Certificate) (*authenticator.Response, bool, error) {
		if len(chain) > 2 && c.signsDirectly() {
			return nil, false, errNotTrusted
		}
		r, ok, err := requestx509.CommonNameUserConversion.User(chain)
		if ok && err == nil && c.other(chain[0]) {
			c.saw(r.User.GetName())
		}
		return r, ok, err
	})
}

// saw remembers a user whose certificate is not of the authority that signs. Nodes report theirs
// themselves. Of too many users those stay that came last.
func (c *ClientCAs) saw(user string) {
	if strings.HasPrefix(user, svc.NodeUserPrefix) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.seen[user]; !known && len(c.seen) >= maxSeen {
		oldest := user
		for name, at := range c.seen {
			if oldest == user || at.Before(c.seen[oldest]) {
				oldest = name
			}
		}
		delete(c.seen, oldest)
	}
	c.seen[user] = time.Now()
}

func (c *ClientCAs) signsDirectly() bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.direct
}

func (c *ClientCAs) other(leaf *x509.Certificate) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.ContainsFunc(c.others, func(id []byte) bool { return bytes.Equal(id, leaf.AuthorityKeyId) })
}

// since returns the users with a certificate of an authority that does not sign who were recognised after a time, in
// order, and reports whether that time is before the first of them could be.
func (c *ClientCAs) since(t time.Time) (users []string, partial bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for name, at := range c.seen {
		if at.After(t) {
			users = append(users, name)
		}
	}
	slices.Sort(users)
	return users, len(c.others) > 0 && c.began.After(t)
}
