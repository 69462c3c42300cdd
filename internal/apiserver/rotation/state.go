// Package rotation replaces the authority of a cluster while everything runs
// (docs/design/018-authority-rotation.md). The state of a rotation is one Secret, which
// all servers follow; the files of a server are brought into line with it by package pki.
package rotation

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// Step is the state of a rotation.
type Step string

// The steps of a rotation.
const (
	// Trust has everybody trust both authorities; the old one signs.
	Trust Step = "trust"
	// Sign has the new authority sign, and everybody renew.
	Sign Step = "sign"
	// Back has the old authority sign again after Sign.
	Back Step = "back"
	// Done is the end: one authority is left.
	Done Step = "done"
)

// SecretName is the name of the Secret in kube-system that is the state of a rotation, and secretType its type.
const (
	SecretName = "fairlead-authority"
	secretType = corev1.SecretType("fairlead.dev/authority-rotation")
)

// state is a rotation. Of its authorities the first is the old one.
type state struct {
	Step Step
	pki.Bundle
}

// signs returns the index of the authority that signs.
func (s *state) signs() int {
	if s.Step == Sign {
		return 1
	}
	return 0
}

// sealed is what only servers with the key of the old authority can read of a state. Kept is the index of the
// authority that is left at the end. The new authority's key is not there at the end.
type sealed struct {
	Step Step `json:"step"`
	Kept int  `json:"kept"`
	// DER, PKCS #8.
	Old    []byte   `json:"old"`
	New    []byte   `json:"new"`
	NewKey []byte   `json:"newKey,omitempty"`
	Cross  [][]byte `json:"cross"`
}

// The keys of the Secret's data. Keys beside the sealed one are only for messages.
const (
	keyStep, keyOld, keyNew, keyKept, keySealed = "step", "old", "new", "kept", "sealed"
)

// errSealed is the error of open for a state that another authority's key has sealed.
var errSealed = errors.New("it is sealed with a key that this server does not have")

// cipherOf returns the cipher of what is sealed with an authority's key.
func cipherOf(a pki.Authority) (cipher.AEAD, error) {
	der, err := x509.MarshalPKCS8PrivateKey(a.Key)
	if err != nil {
		return nil, err
	}
	key, err := hkdf.Key(sha256.New, der, nil, "fairlead authority rotation", 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// seal returns the Secret of a state. kept is the index of the authority that is left by Done.
func (s *state) seal(kept int) (*corev1.Secret, error) {
	before, next := s.Authorities[0], s.Authorities[1]
	content := sealed{Step: s.Step, Kept: kept, Old: before.Cert.Raw, New: next.Cert.Raw}
	for _, c := range s.Cross {
		content.Cross = append(content.Cross, c.Raw)
	}
	var err error
	if s.Step != Done {
		if content.NewKey, err = x509.MarshalPKCS8PrivateKey(next.Key); err != nil {
			return nil, err
		}
	}
	text, err := json.Marshal(content)
	if err != nil {
		return nil, err
	}
	aead, err := cipherOf(before)
	if err != nil {
		return nil, err
	}
	out := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: SecretName, Namespace: metav1.NamespaceSystem},
		Type:       secretType,
		Data: map[string][]byte{
			keyStep: []byte(s.Step), keyOld: []byte(pki.Hash(before.Cert)), keyNew: []byte(pki.Hash(next.Cert)),
			keySealed: aead.Seal(nil, nil, text, []byte(SecretName)),
		},
	}
	if s.Step == Done {
		out.Data[keyKept] = []byte(pki.Hash(s.Authorities[kept].Cert))
	}
	return out, nil
}

// open reads a Secret as one who has the keys of a bundle, and returns the state and the bundle that follows from it.
func open(secret *corev1.Secret, have *pki.Bundle) (*state, *pki.Bundle, error) {
	var content sealed
	found := false
	for _, a := range have.Authorities {
		if a.Key == nil || pki.Hash(a.Cert) != string(secret.Data[keyOld]) {
			continue
		}
		aead, err := cipherOf(a)
		if err != nil {
			return nil, nil, err
		}
		text, err := aead.Open(nil, nil, secret.Data[keySealed], []byte(SecretName))
		if err != nil {
			return nil, nil, fmt.Errorf("the Secret %s/%s was not written by a server of this cluster: %w", secret.Namespace, secret.Name, err)
		}
		if err := json.Unmarshal(text, &content); err != nil {
			return nil, nil, err
		}
		found = true
	}
	if !found {
		return nil, nil, errSealed
	}
	s := &state{Step: content.Step}
	for _, der := range [][]byte{content.Old, content.New} {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, nil, err
		}
		a := pki.Authority{Cert: cert}
		for _, h := range have.Authorities {
			if h.Cert.Equal(cert) {
				a.Key = h.Key
			}
		}
		s.Authorities = append(s.Authorities, a)
	}
	for _, der := range content.Cross {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, nil, err
		}
		s.Cross = append(s.Cross, c)
	}
	if len(content.NewKey) > 0 {
		key, err := pki.ParseKey(content.NewKey)
		if err != nil {
			return nil, nil, err
		}
		s.Authorities[1].Key = key
	}
	b, err := s.bundle(content.Kept)
	return s, b, err
}

// bundle returns what servers sign with and trust in this step.
func (s *state) bundle(kept int) (*pki.Bundle, error) {
	before, next := s.Authorities[0], s.Authorities[1]
	b := &pki.Bundle{Cross: s.Cross}
	switch s.Step {
	case Trust, Back:
		b.Authorities = []pki.Authority{before, next}
	case Sign:
		b.Authorities = []pki.Authority{next, before}
	case Done:
		if b.Authorities = []pki.Authority{s.Authorities[kept]}; kept == 0 {
			b.Cross = nil // no client is left that only knows the new one
		}
	default:
		return nil, fmt.Errorf("the rotation is at step %q, which this version does not know", s.Step)
	}
	if b.Signer().Key == nil {
		return nil, errSealed
	}
	return b, nil
}
