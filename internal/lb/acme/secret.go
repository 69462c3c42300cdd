package acme

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// challengeEntry begins the entries of a Secret that have the certificates of challenges, by host names.
	challengeEntry = "acme-tls-1."
	// tokenEntry begins the entries that have the answers of HTTP-01, by tokens.
	tokenEntry = "acme-http-1."
	// maxToken bounds a token, and its answer.
	maxToken = 200
	// maxChallenges bounds the challenges in a Secret.
	maxChallenges = 20
)

// Challenges returns the certificates of challenges that a Secret has, by host names.
func Challenges(s *corev1.Secret) map[string]*tls.Certificate {
	var out map[string]*tls.Certificate
	for _, key := range slices.Sorted(maps.Keys(s.Data)) {
		host, is := strings.CutPrefix(key, challengeEntry)
		if !is || len(out) == maxChallenges {
			continue
		}
		if cert, err := tls.X509KeyPair(s.Data[key], s.Data[key]); err == nil {
			if out == nil {
				out = map[string]*tls.Certificate{}
			}
			out[host] = &cert
		}
	}
	return out
}

// Tokens returns the answers to challenges by HTTP-01 that a Secret has, by tokens.
func Tokens(s *corev1.Secret) map[string]string {
	var out map[string]string
	for _, key := range slices.Sorted(maps.Keys(s.Data)) {
		token, is := strings.CutPrefix(key, tokenEntry)
		text := string(s.Data[key])
		if !is || len(out) == maxChallenges || !isToken(token) || !strings.HasPrefix(text, token+".") || len(text) > 2*maxToken {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[token] = text
	}
	return out
}

// Answers are what a Secret has for an authority.
type Answers struct {
	Challenges map[string]*tls.Certificate // by host names
	Tokens     map[string]string           // by tokens
}

// AnswersOf returns the ones of a Secret.
func AnswersOf(s *corev1.Secret) Answers { return Answers{Challenges(s), Tokens(s)} }

// Empty reports whether there are none.
func (a *Answers) Empty() bool { return len(a.Challenges)+len(a.Tokens) == 0 }

// isToken reports whether an authority's token is one (RFC 8555, 8.3), which also an entry of a Secret can be named by.
func isToken(s string) bool {
	other := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_'
	}
	return s != "" && len(s) <= maxToken && !strings.ContainsFunc(s, other)
}

// state is what a Secret has of an order.
type state struct {
	cert, key  []byte            // in PEM
	issued     bool              // by an authority: otherwise the certificate stands in for one
	challenges map[string][]byte // by entries
	failures   int
	after      time.Time // of the next order, zero if it may be now
}

// stateOf reads a Secret. Orders for other hosts than these do not count.
func stateOf(s *corev1.Secret, hosts []string) *state {
	issued := s.Annotations[svc.ACMEIssuedAnnotation] == "true"
	st := &state{cert: s.Data[corev1.TLSCertKey], key: s.Data[corev1.TLSPrivateKeyKey], issued: issued}
	if s.Annotations[svc.ACMEHostsAnnotation] != strings.Join(hosts, ",") {
		return st
	}
	st.failures, _ = strconv.Atoi(s.Annotations[svc.ACMEFailuresAnnotation])
	st.after, _ = time.Parse(time.RFC3339, s.Annotations[svc.ACMERetryAnnotation])
	return st
}

// leaf returns the certificate of an authority that is for hosts, and no others; nil if there is none.
func (s *state) leaf(hosts []string) *x509.Certificate {
	pair, err := tls.X509KeyPair(s.cert, s.key)
	if err != nil || !s.issued {
		return nil
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		return nil
	}
	names := slices.Sorted(slices.Values(leaf.DNSNames))
	if !slices.Equal(names, hosts) {
		return nil
	}
	return leaf
}

// standIn returns a state with a certificate that no client trusts, so that nodes listen and can answer challenges.
func standIn() (*state, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: svc.ACMEStandInName},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, text, err := encode([][]byte{der}, key)
	return &state{cert: cert, key: text}, err
}

// encode returns a chain and its key in PEM.
func encode(chain [][]byte, key any) (cert, text []byte, err error) {
	for _, der := range chain {
		cert = append(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	return cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), err
}

// parseKey reads the key of an account.
func parseKey(text []byte) (*ecdsa.PrivateKey, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, errors.New("it has no PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if k, ok := key.(*ecdsa.PrivateKey); ok {
		return k, nil
	}
	return nil, errors.Join(errors.New("it has no key of ECDSA"), err)
}
