package accounts

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// The files of a directory pki that have the keys of tokens.
const (
	KeyFile    = "sa.key" // signs
	PublicFile = "sa.pub" // further keys whose tokens are valid
	// NextFile is the key that will sign, and is given to all servers; OldFile the public key of the one before.
	NextFile = "sa-next.key"
	OldFile  = "sa-old.pub"
)

// Files are the files with keys of tokens, which all servers of a cluster have alike; also one that joins while the key is replaced.
// All but KeyFile may be missing.
func Files() []string { return []string{KeyFile, PublicFile, NextFile, OldFile} }

// Stage is how far the replacement of the key of tokens is at a server.
type Stage string

// The stages, in their order.
const (
	NotRotating Stage = "none"
	Published   Stage = "published" // the tokens of the next key are valid, the old key signs
	Signing     Stage = "signing"   // the new key signs, the tokens of the old one are valid
)

// KeyState is what a directory has of the keys of tokens, by their IDs.
type KeyState struct {
	Stage Stage `json:"stage"`
	// Signs is the key that signs, Next the one that will, Old the one that signed before.
	Signs string `json:"signs"`
	Next  string `json:"next,omitempty"`
	Old   string `json:"old,omitempty"`
	// Since is when the key that signs was written.
	Since time.Time `json:"since"`
}

// KeyDir is the directory pki of a server, in which the key of tokens is replaced in stages. Each stage may be taken again after it
// was interrupted.
type KeyDir string

func (d KeyDir) file(name string) string { return filepath.Join(string(d), name) }

// State reads the directory.
func (d KeyDir) State() (s KeyState, err error) {
	info, err := os.Stat(d.file(KeyFile))
	if err != nil {
		return s, err
	}
	s.Stage, s.Since = NotRotating, info.ModTime()
	if s.Signs, err = d.private(KeyFile); err != nil {
		return s, err
	}
	if old, err := d.read(OldFile); err != nil {
		return s, err
	} else if old != nil {
		keys, err := publicKeys(d.file(OldFile), old)
		if err != nil || len(keys) == 0 {
			return s, errors.Join(fmt.Errorf("%s has no key", d.file(OldFile)), err)
		}
		if s.Old, err = keyID(keys[0]); err != nil {
			return s, err
		}
		s.Stage = Signing
	}
	if next, err := d.read(NextFile); err != nil || next == nil {
		return s, err
	}
	if s.Next, err = d.private(NextFile); err != nil {
		return s, err
	}
	if s.Next == s.Signs {
		s.Next = "" // Sign was interrupted
		return s, nil
	}
	s.Stage = Published
	return s, nil
}

// Publish makes the tokens of the next key valid. next is its private key as PEM, empty to have one made, or to keep the one that the
// directory has.
func (d KeyDir) Publish(next []byte) error {
	s, err := d.State()
	if err != nil {
		return err
	}
	if s.Stage == Signing {
		return errors.New("the new key signs already: finish this rotation before another one")
	}
	if len(next) == 0 {
		if next, err = d.read(NextFile); err != nil {
			return err
		}
	}
	if len(next) == 0 {
		if _, next, err = pki.NewKey(); err != nil {
			return err
		}
	}
	key, err := signingKey("the next key", next)
	if err != nil {
		return err
	}
	if algorithmOf(key.Public()) == "" {
		return fmt.Errorf("a token is signed with an RSA or an ECDSA key, not with a %T", key)
	}
	id, err := keyID(key.Public())
	switch {
	case err != nil:
		return err
	case id == s.Signs:
		return errors.New("the next key is the one that signs")
	case s.Next != "" && s.Next != id:
		return fmt.Errorf("%s has another key: abort that rotation first", d.file(NextFile))
	}
	signs, err := d.publicOf(KeyFile)
	if err != nil {
		return err
	}
	further, err := d.read(PublicFile)
	if err != nil {
		return err
	}
	fresh, err := publicPEM(key.Public())
	if err != nil {
		return err
	}
	for _, k := range [][]byte{signs, fresh} {
		if !bytes.Contains(further, k) {
			further = append(append(bytes.TrimRight(further, "\n"), newline(further)...), k...)
		}
	}
	for _, f := range []struct {
		name string
		text []byte
	}{{NextFile, next}, {PublicFile, further}, {OldFile, signs}} { // no public key without its private one, if this is interrupted
		if err := d.write(f.name, f.text); err != nil {
			return err
		}
	}
	return nil
}

func newline(text []byte) []byte {
	if len(bytes.TrimSpace(text)) == 0 {
		return nil
	}
	return []byte("\n")
}

// Sign makes the next key the one that signs. All servers must know it by then.
func (d KeyDir) Sign() error {
	s, err := d.State()
	switch {
	case err != nil:
		return err
	case s.Next == "" && s.Stage == Signing:
		return nil // taken before
	case s.Next == "":
		return errors.New("there is no next key: publish one first")
	}
	if err := d.Publish(nil); err != nil { // it may have been interrupted
		return err
	}
	next, err := d.read(NextFile)
	if err != nil {
		return err
	}
	if err := d.write(KeyFile, next); err != nil {
		return err
	}
	return d.remove(NextFile)
}

// Finish makes the tokens of the old key invalid.
func (d KeyDir) Finish() error {
	s, err := d.State()
	switch {
	case err != nil:
		return err
	case s.Stage == NotRotating:
		return errors.New("no key is being replaced")
	case s.Stage == Published:
		return errors.New("the old key still signs")
	}
	if err := d.remove(NextFile); err != nil {
		return err
	}
	return d.drop(s.Old, s.Signs)
}

// Abort forgets the next key, before it signs.
func (d KeyDir) Abort() error {
	s, err := d.State()
	switch {
	case err != nil:
		return err
	case s.Stage != Published:
		return errors.New("there is no next key that does not sign yet")
	}
	if err := d.drop(s.Next, s.Signs); err != nil {
		return err
	}
	return d.remove(NextFile)
}

// drop removes the keys with the given IDs from PublicFile, which goes if nothing is left, and the mark of a rotation.
func (d KeyDir) drop(ids ...string) error {
	text, err := d.read(PublicFile)
	if err != nil {
		return err
	}
	keys, err := publicKeys(d.file(PublicFile), text)
	if err != nil {
		return err
	}
	var kept []byte
	for _, k := range keys {
		id, err := keyID(k)
		if err != nil {
			return err
		}
		if id == ids[0] || id == ids[1] {
			continue
		}
		one, err := publicPEM(k)
		if err != nil {
			return err
		}
		kept = append(kept, one...)
	}
	if len(kept) > 0 {
		err = d.write(PublicFile, kept)
	} else {
		err = d.remove(PublicFile)
	}
	if err != nil {
		return err
	}
	return d.remove(OldFile)
}

// remove removes a file, which may not exist.
func (d KeyDir) remove(name string) error {
	if err := os.Remove(d.file(name)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// private returns the ID of a private key.
func (d KeyDir) private(name string) (string, error) {
	text, err := os.ReadFile(d.file(name))
	if err != nil {
		return "", err
	}
	key, err := signingKey(d.file(name), text)
	if err != nil {
		return "", err
	}
	return keyID(key.Public())
}

// publicOf returns the public key of a private one, as PEM.
func (d KeyDir) publicOf(name string) ([]byte, error) {
	text, err := os.ReadFile(d.file(name))
	if err != nil {
		return nil, err
	}
	key, err := signingKey(d.file(name), text)
	if err != nil {
		return nil, err
	}
	return publicPEM(key.Public())
}

func publicPEM(k crypto.PublicKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(k)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// read returns the text of a file, nil if it does not exist.
func (d KeyDir) read(name string) ([]byte, error) {
	text, err := os.ReadFile(d.file(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return text, err
}

// write replaces a file.
func (d KeyDir) write(name string, text []byte) error {
	return fileio.Replace(d.file(name), text, 0o600)
}
