package accounts

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	jose "github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"
	"k8s.io/client-go/util/keyutil"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/registry/serviceaccount"
)

// Issuer signs tokens with one key and knows the public keys of earlier ones.
type Issuer struct {
	// Name is the issuer (claim "iss"), Audiences are the audiences of a token that
	// asks for none.
	Name      string
	Audiences []string

	keyFile, pubFile string
	keys             atomic.Pointer[keys]
}

// keys are what an Issuer signs and verifies with; public begins with the key of signer.
type keys struct {
	signer jose.Signer
	public []crypto.PublicKey
	// since is when the key of signer was written; it signs since followPeriod later at most.
	since time.Time
	// text is that of the files they were read from.
	text [2]string
}

var _ serviceaccount.Issuer = (*Issuer)(nil)

// NewIssuer reads the signing key from keyFile (PEM; made, mode 0600, if it is
// missing) and further keys that verify tokens from pubFile, which may be missing.
func NewIssuer(name string, audiences []string, keyFile, pubFile string) (*Issuer, error) {
	i := &Issuer{Name: name, Audiences: audiences, keyFile: keyFile, pubFile: pubFile}
	if _, err := os.Stat(keyFile); errors.Is(err, fs.ErrNotExist) {
		_, keyPEM, err := pki.NewKey()
		if err != nil {
			return nil, err
		}
		if err := fileio.Replace(keyFile, keyPEM, 0o600); err != nil {
			return nil, err
		}
	}
	if _, err := i.reload(); err != nil {
		return nil, err
	}
	return i, nil
}

// followPeriod is the time between two looks at the files with keys.
const followPeriod = 5 * time.Second

// Follow uses the keys in the files as they change, until ctx ends (fairlead certs rotate-token-key). What cannot be read leaves the
// keys as they are.
func (i *Issuer) Follow(ctx context.Context, log *slog.Logger) {
	failed := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(followPeriod):
		}
		changed, err := i.reload()
		switch {
		case err != nil && err.Error() != failed:
			failed = err.Error()
			log.Error("cannot read the keys of tokens; the ones before stay in use", "err", err)
		case err == nil:
			failed = ""
		}
		if changed {
			id, _ := keyID(i.keys.Load().public[0]) // a key that was read has one
			log.Info("the keys of tokens have changed", "signs", id, "verify", len(i.keys.Load().public))
		}
	}
}

// reload reads the files, and reports whether they have changed.
func (i *Issuer) reload() (changed bool, err error) {
	private, err := os.ReadFile(i.keyFile)
	if err != nil {
		return false, err
	}
	public, err := os.ReadFile(i.pubFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	text := [2]string{string(private), string(public)}
	if have := i.keys.Load(); have != nil && have.text == text {
		return false, nil
	}
	key, err := signingKey(i.keyFile, private)
	if err != nil {
		return false, err
	}
	algorithm := algorithmOf(key.Public())
	if algorithm == "" {
		return false, fmt.Errorf("%s: a token is signed with an RSA or an ECDSA key, not with a %T", i.keyFile, key)
	}
	id, err := keyID(key.Public())
	if err != nil {
		return false, err
	}
	info, err := os.Stat(i.keyFile) // after it was read: of two writes it is the later one
	if err != nil {
		return false, err
	}
	next := &keys{text: text, public: []crypto.PublicKey{key.Public()}, since: info.ModTime()}
	next.signer, err = jose.NewSigner(jose.SigningKey{Algorithm: algorithm, Key: jose.JSONWebKey{Key: key, KeyID: id}}, nil)
	if err != nil {
		return false, fmt.Errorf("%s: %w", i.keyFile, err)
	}
	earlier, err := publicKeys(i.pubFile, public)
	if err != nil {
		return false, err
	}
	for _, k := range earlier {
		if !key.Public().(interface{ Equal(crypto.PublicKey) bool }).Equal(k) {
			next.public = append(next.public, k)
		}
	}
	i.keys.Store(next)
	return true, nil
}

// publicKeys reads the keys in the text of a file, which may be empty.
func publicKeys(file string, text []byte) ([]any, error) {
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, nil
	}
	all, err := keyutil.ParsePublicKeysPEM(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return all, nil
}

// signingKey reads the key in the text of a file.
func signingKey(file string, text []byte) (crypto.Signer, error) {
	key, err := keyutil.ParsePrivateKeyPEM(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; put a private key in PEM there, or remove the file to have one made", file, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s holds a key that cannot sign", file)
	}
	return signer, nil
}

// algorithms are the signature algorithms of tokens (RFC 7518, section 3.1).
var algorithms = []jose.SignatureAlgorithm{jose.RS256, jose.ES256, jose.ES384, jose.ES512}

// algorithmOf returns the algorithm of signatures with a key, "" for a key that
// tokens are not signed with.
func algorithmOf(k crypto.PublicKey) jose.SignatureAlgorithm {
	switch k := k.(type) {
	case *rsa.PublicKey:
		return jose.RS256
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			return jose.ES256
		case elliptic.P384():
			return jose.ES384
		case elliptic.P521():
			return jose.ES512
		}
	}
	return ""
}

// keyID returns the ID of a key, its hash as in Kubernetes.
func keyID(k crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(k)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(der)
	return base64.RawURLEncoding.EncodeToString(sum[:]), nil
}

// Issue signs a token with c that is valid for life from now. id identifies the
// token, for example in the audit log.
func (i *Issuer) Issue(c serviceaccount.Claims, now time.Time, life time.Duration) (token, id string, err error) {
	id = uuid.NewString()
	token, err = jwt.Signed(i.keys.Load().signer).Claims(&jwt.Claims{
		Issuer: i.Name, Subject: c.Subject(), Audience: c.Audiences, ID: id,
		IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(life)),
	}).Claims(&private{c.Bound()}).Serialize()
	return token, id, err
}

// DefaultAudiences returns the audiences of the API itself.
func (i *Issuer) DefaultAudiences() []string { return i.Audiences }

// private is the private claim of Kubernetes' tokens.
type private struct {
	Kubernetes serviceaccount.Bound `json:"kubernetes.io"`
}
