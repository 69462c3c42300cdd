package accounts

import (
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
	"os"
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

	signer jose.Signer
	public []crypto.PublicKey
}

var _ serviceaccount.Issuer = (*Issuer)(nil)

// NewIssuer reads the signing key from keyFile (PEM; made, mode 0600, if it is
// missing) and further keys that verify tokens from pubFile, which may be missing.
func NewIssuer(name string, audiences []string, keyFile, pubFile string) (*Issuer, error) {
	key, err := signingKey(keyFile)
	if err != nil {
		return nil, err
	}
	algorithm := algorithmOf(key.Public())
	if algorithm == "" {
		return nil, fmt.Errorf("%s: a token is signed with an RSA or an ECDSA key, not with a %T", keyFile, key)
	}
	id, err := keyID(key.Public())
	if err != nil {
		return nil, err
	}
	i := &Issuer{Name: name, Audiences: audiences, public: []crypto.PublicKey{key.Public()}}
	i.signer, err = jose.NewSigner(jose.SigningKey{Algorithm: algorithm, Key: jose.JSONWebKey{Key: key, KeyID: id}}, nil)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", keyFile, err)
	}
	earlier, err := keyutil.PublicKeysFromFile(pubFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", pubFile, err)
	}
	for _, k := range earlier {
		i.public = append(i.public, k)
	}
	return i, nil
}

func signingKey(file string) (crypto.Signer, error) {
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		key, keyPEM, err := pki.NewKey()
		if err != nil {
			return nil, err
		}
		return key, fileio.Replace(file, keyPEM, 0o600)
	}
	if err != nil {
		return nil, err
	}
	key, err := keyutil.ParsePrivateKeyPEM(data)
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
	token, err = jwt.Signed(i.signer).Claims(&jwt.Claims{
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
