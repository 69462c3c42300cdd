// Package join lets a new node join a server, and keeps its certificate.
//
// The text form of a join token is "fairlead1.HASH.ID.SECRET": HASH is the SHA-256 of
// the certificate of the cluster's authority (DER, in hex), by which the node
// authenticates the server without any file of it, and SECRET authenticates the node
// to the server, which knows it by ID.
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

const prefix = "fairlead1"

// timeout bounds the one connection that fetches the authority.
const timeout = 10 * time.Second

// Token is a parsed token.
type Token struct {
	// Hash is the SHA-256 of the authority's certificate in hex, ID and Secret are
	// random: 6 and 16 of the letters a to z and 2 to 7.
	Hash, ID, Secret string
}

// New returns a new token for the cluster of the authority ca.
func New(ca *x509.Certificate) Token {
	random := strings.ToLower(rand.Text())
	return Token{Hash: pki.Hash(ca), ID: random[:idLen], Secret: random[idLen : idLen+secretLen]}
}

// Lengths of the parts of a token, those of a bootstrap token. The secret has 80 bits.
const (
	idLen     = 6
	secretLen = 16
)

// String returns the text form. It is a secret: do not log it.
func (t Token) String() string { return prefix + "." + t.Hash + "." + t.ID + "." + t.Secret }

// ErrOldForm is the error of Parse for a token without an end, of earlier releases.
var ErrOldForm = errors.New("this join token is of an earlier release and no longer valid: make one with 'fairlead token create'")

// Parse reads the text form.
func Parse(s string) (Token, error) {
	parts := strings.Split(strings.TrimSpace(s), ".")
	if len(parts) == 3 && parts[0] == prefix {
		return Token{}, ErrOldForm
	}
	if len(parts) != 4 || parts[0] != prefix || len(parts[2]) != idLen || len(parts[3]) != secretLen {
		return Token{}, fmt.Errorf("not a join token: want what 'fairlead token create' prints, %s.HASH.ID.SECRET", prefix)
	}
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
				return fmt.Errorf("the server is not of the token's cluster: no certificate in its chain has the hash %s", hash)
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
