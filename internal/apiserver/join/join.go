// Package join lets a new node join a server, and keeps its certificate.
//
// The text form of a join token is "fairlead1.HASH.ID.SECRET": HASH is the SHA-256 of
// the certificate of the cluster's authority (DER, in hex), by which the node
// authenticates the server without any file of it, and SECRET authenticates the node
// to the server, which knows it by ID. One with which a machine may only ask, and an
// administrator approves, begins with "fairlead-approval1". That of a server, with which
// a machine becomes another server of the cluster, begins with "fairlead-server1".
package join

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// The first part of a token.
const (
	prefix         = "fairlead1"
	approvalPrefix = "fairlead-approval1"
	serverPrefix   = "fairlead-server1"
)

// timeout bounds the one connection that fetches the authority.
const timeout = 10 * time.Second

// Token is a parsed token.
type Token struct {
	// Hash is the SHA-256 of the authority's certificate in hex, ID and Secret are
	// random: 6 and 16 of the letters a to z and 2 to 7; the secret of a server has 26.
	Hash, ID, Secret string
	// Server is set for the token of a server, which is worth the whole cluster.
	Server bool
	// Approval is set for the token of a node whose request an administrator approves.
	Approval bool
}

// New returns a new token for the cluster of the authority ca.
func New(ca *x509.Certificate) Token {
	random := strings.ToLower(rand.Text())
	return Token{Hash: pki.Hash(ca), ID: random[:idLen], Secret: random[idLen : idLen+secretLen]}
}

// NewServer returns a new token for further servers of the cluster of the authority ca.
func NewServer(ca *x509.Certificate) Token {
	return Token{Hash: pki.Hash(ca), ID: strings.ToLower(rand.Text())[:idLen], Secret: strings.ToLower(rand.Text()), Server: true}
}

// Lengths of the parts of a token, as in a bootstrap token. The secret has 80 bits, that of a
// server 130.
const (
	idLen           = 6
	secretLen       = 16
	serverSecretLen = 26
)

// String returns the text form. It is a secret: do not log it.
func (t Token) String() string {
	first := prefix
	switch {
	case t.Server:
		first = serverPrefix
	case t.Approval:
		first = approvalPrefix
	}
	return first + "." + t.Hash + "." + t.ID + "." + t.Secret
}

// ErrOldForm is the error of Parse for a token without an end, of earlier releases.
var ErrOldForm = errors.New("this join token is of an earlier release and no longer valid: make one with 'fairlead token create'")

// Parse reads the text form of a node's token.
func Parse(s string) (Token, error) {
	parts := strings.Split(strings.TrimSpace(s), ".")
	switch {
	case len(parts) == 3 && parts[0] == prefix:
		return Token{}, ErrOldForm
	case parts[0] == serverPrefix:
		return Token{}, errors.New("this is the token of a server: nodes join with one of 'fairlead token create', without --server")
	case len(parts) != 4 || parts[0] != prefix && parts[0] != approvalPrefix || len(parts[2]) != idLen || len(parts[3]) != secretLen:
		return Token{}, fmt.Errorf("not a join token: want what 'fairlead token create' prints, %s.HASH.ID.SECRET", prefix)
	}
	t, err := parsed(parts)
	t.Approval = parts[0] == approvalPrefix
	return t, err
}

// ParseServer reads the text form of a server's token.
func ParseServer(s string) (Token, error) {
	parts := strings.Split(strings.TrimSpace(s), ".")
	switch {
	case parts[0] == prefix || parts[0] == approvalPrefix:
		return Token{}, errors.New("this is the token of a node: servers join with one of 'fairlead token create --server'")
	case len(parts) != 4 || parts[0] != serverPrefix || len(parts[2]) != idLen || len(parts[3]) != serverSecretLen:
		return Token{}, fmt.Errorf("not the token of a server: want what 'fairlead token create --server' prints, %s.HASH.ID.SECRET",
			serverPrefix)
	}
	t, err := parsed(parts)
	t.Server = true
	return t, err
}

// parsed returns the token of four parts.
func parsed(parts []string) (Token, error) {
	if raw, err := hex.DecodeString(parts[1]); err != nil || len(raw) != 32 {
		return Token{}, errors.New("not a join token: its second part is not a SHA-256 in hex; copy the whole line")
	}
	return Token{Hash: strings.ToLower(parts[1]), ID: parts[2], Secret: parts[3]}, nil
}

// Config connects to server, a URL like https://192.0.2.1:6443, checks that
// it belongs to the token's cluster, and returns the configuration of a client
// that trusts this cluster only and presents the token.
func Config(ctx context.Context, server, token string) (*rest.Config, error) {
	t, err := Parse(token)
	if err != nil {
		return nil, err
	}
	return t.Config(ctx, server)
}

// Config is that of the package for a token that was parsed.
func (t Token) Config(ctx context.Context, server string) (*rest.Config, error) {
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("%q is not the address of a server: want https://HOST:PORT", server)
	}
	host := u.Host
	if u.Port() == "" {
		host = net.JoinHostPort(u.Hostname(), "6443")
		u.Host = host
	}
	ca, err := fetchAuthority(ctx, host, u.Hostname(), t.Hash)
	if err != nil {
		return nil, fmt.Errorf("cannot join %s: %w", u, err)
	}
	return &rest.Config{
		Host:            u.String(),
		BearerToken:     t.String(),
		TLSClientConfig: rest.TLSClientConfig{CAData: ca},
	}, nil
}

// otherClusterError is that of a server whose authority is not the one of the token.
type otherClusterError struct{ hash string }

func (e *otherClusterError) Error() string {
	return "the server is not of the token's cluster, or the authority of that was replaced since the token was made " +
		"('fairlead token create' makes another one): no certificate in its chain has the hash " + e.hash
}

// IsOtherCluster reports whether err is that of a server that does not belong to the token's
// cluster.
func IsOtherCluster(err error) bool {
	var other *otherClusterError
	return errors.As(err, &other)
}

// fetchAuthority returns, as PEM, the certificate with the given hash from the
// chain that the server sends, after checking the chain against it.
func fetchAuthority(ctx context.Context, addr, name, hash string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var found *x509.Certificate
	d := tls.Dialer{Config: &tls.Config{
		ServerName: name,
		// The usual check needs the authority, which is not known yet; the one
		// below replaces it.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			for _, c := range s.PeerCertificates {
				if c.IsCA && pki.Hash(c) == hash {
					found = c
				}
			}
			if found == nil {
				return &otherClusterError{hash}
			}
			roots, rest := x509.NewCertPool(), x509.NewCertPool()
			roots.AddCert(found)
			for _, c := range s.PeerCertificates[1:] {
				rest.AddCert(c)
			}
			_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{DNSName: name, Roots: roots, Intermediates: rest})
			return err
		},
	}}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: found.Raw}), nil
}
