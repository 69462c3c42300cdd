package api

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// Certificate is the serving certificate of the endpoint. It is self-signed: the
// API server trusts its fingerprint, which the agent writes into its Node.
type Certificate struct {
	pair        tls.Certificate
	Fingerprint string
}

// certificateLife is long, because trust only depends on the fingerprint.
const certificateLife = 10 * 365 * 24 * time.Hour

// LoadCertificate reads the node's certificate from dir, or makes one. A pair that
// cannot be used is an error and not overwritten.
func LoadCertificate(dir, node string) (Certificate, error) {
	path := filepath.Join(dir, "serving.pem")
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		if b, err = makeCertificate(node); err == nil {
			err = fileio.Replace(path, b, 0o600)
		}
	}
	if err != nil {
		return Certificate{}, fmt.Errorf("the endpoint's certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(b, b)
	if err != nil {
		return Certificate{}, fmt.Errorf("%s: %w; remove it and start the agent again, which makes a new one", path, err)
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		return Certificate{}, fmt.Errorf("%s: %w; remove it and start the agent again, which makes a new one", path, err)
	}
	if time.Now().After(leaf.NotAfter) {
		return Certificate{}, fmt.Errorf("%s expired at %s; remove it and start the agent again, which makes a new one", path, leaf.NotAfter)
	}
	sum := sha256.Sum256(pair.Certificate[0])
	return Certificate{pair: pair, Fingerprint: hex.EncodeToString(sum[:])}, nil
}

// makeCertificate returns a new certificate and its key as PEM.
func makeCertificate(node string) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: node}, DNSNames: []string{node},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(certificateLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	out := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return append(out, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})...), nil
}
