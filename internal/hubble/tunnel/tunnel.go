// Package tunnel connects nodes with a relay of flows where there are no agents that an API server could lead to. Each node makes one
// connection to the relay, and shows a token that names the node. Then the sides change: over the connection the relay asks, and the
// node answers. So nodes listen nowhere on the network.
//
// The relay makes a certificate at its start and publishes it, with its address, in a ConfigMap that only it may change. Nodes accept
// this certificate and no other.
package tunnel

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/http"
	"time"
)

const (
	// Audience is that of the tokens which nodes show to the relay; the API server does not accept them.
	Audience = "fairlead-hubble-relay"
	// ConfigMap is the name of the ConfigMap in which the relay publishes what follows.
	ConfigMap = "fairlead-hubble-relay"
	// addressKey has HOST:PORT, and certificateKey PEM.
	addressKey     = "address"
	certificateKey = "tls.crt"
)

const (
	// serverName is that of the relay's certificate, whatever its address is.
	serverName = "hubble-relay.fairlead.dev"
	// protocol is what a node asks for by the header field Upgrade. Then the relay speaks HTTP/2 to it.
	protocol = "fairlead-flows"
	// handshake bounds the time until a connection is used.
	handshake = 10 * time.Second
	// certificateLife is longer than a relay runs.
	certificateLife = 10 * 365 * 24 * time.Hour
)

// silence is for both sides: a connection ends when the other side has not answered for this long.
func silence() *http.HTTP2Config {
	return &http.HTTP2Config{
		SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second,
		// A relay asks up to 32 questions of a node at a time. Clients that read slowly keep so much of each answer in the relay's memory.
		MaxReceiveBufferPerStream: 64 << 10, MaxReceiveBufferPerConnection: 3 << 20,
	}
}

func unencryptedHTTP2() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true) // within TLS, after another protocol
	return p
}

// makeCertificate returns a new certificate with its key, and the certificate as PEM.
func makeCertificate() (tls.Certificate, string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return tls.Certificate{}, "", err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: serverName}, DNSNames: []string{serverName},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(certificateLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, string(text), nil
}
