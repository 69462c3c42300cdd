package pki

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// File is a certificate in a directory.
type File struct {
	// Name is that of the file without its extension.
	Name    string `json:"name"`
	Subject string `json:"subject"`
	// Issuer is the Hash of the authority that signed it, empty if that is none of the directory's, and of an
	// authority its own.
	Issuer string    `json:"issuer,omitempty"`
	Begins time.Time `json:"begins"`
	Ends   time.Time `json:"ends"`
}

// List returns the authorities in a directory, the signing one first, and the other certificates by name.
func List(dir string) (authorities, leaves []File, err error) {
	text, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		return nil, nil, err
	}
	trusted := certs(text)
	for _, c := range trusted {
		authorities = append(authorities, fileOf("ca", c, Hash(c)))
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".crt")
		if !ok || name == "ca" || name == "ca-cross" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if os.IsNotExist(err) {
			continue // about to be renewed
		}
		if err != nil {
			return nil, nil, err
		}
		leaf, err := firstCert(text)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", filepath.Join(dir, e.Name()), err)
		}
		issuer := ""
		for _, c := range trusted {
			if bytes.Equal(c.SubjectKeyId, leaf.AuthorityKeyId) && leaf.CheckSignatureFrom(c) == nil {
				issuer = Hash(c)
			}
		}
		leaves = append(leaves, fileOf(name, leaf, issuer))
	}
	return authorities, leaves, nil
}

func fileOf(name string, c *x509.Certificate, issuer string) File {
	return File{Name: name, Subject: c.Subject.String(), Issuer: issuer, Begins: c.NotBefore.UTC(), Ends: c.NotAfter.UTC()}
}

// Parse returns the first certificate in PEM text.
func Parse(text []byte) (*x509.Certificate, error) { return firstCert(text) }
