package basic

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"strings"
	"sync"
	"time"
)

// Bounds of a Verifier.
const (
	// maxKnown is how many names with their passwords are known at a time, twice at most.
	maxKnown = 4096
	// patience is how long a password waits for others to be verified.
	patience = 2 * time.Second
)

// Verifier verifies passwords, some at a time: each takes as long as its hash asks for. It knows the right ones again.
type Verifier struct {
	key   [sha256.Size]byte
	slots chan struct{}

	mu sync.Mutex
	// shares are of the namespaces whose passwords are verified or wait.
	shares map[string]*share
	// known are digests of what was right, of now and before: none of them leads back to a password without the key.
	known, before map[[sha256.Size]byte]struct{}
}

// share are the slots that a namespace may have: half of all, so that its slow hashes leave other namespaces some.
type share struct {
	slots chan struct{}
	uses  int
}

// share returns the share of a namespace. leave follows.
func (v *Verifier) share(namespace string) *share {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := v.shares[namespace]
	if s == nil {
		s = &share{slots: make(chan struct{}, max(1, cap(v.slots)/2))}
		v.shares[namespace] = s
	}
	s.uses++
	return s
}

func (v *Verifier) leave(namespace string, s *share) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if s.uses--; s.uses == 0 {
		delete(v.shares, namespace)
	}
}

// SlotsOf returns how many passwords a node with so many processors verifies at a time: half as many, and two at least, of which one
// namespace never has all.
func SlotsOf(processors int) int { return max(2, processors/2) }

// NewVerifier returns a Verifier of so many passwords at a time.
func NewVerifier(slots int) *Verifier {
	v := &Verifier{slots: make(chan struct{}, slots), known: map[[sha256.Size]byte]struct{}{}, shares: map[string]*share{}}
	_, _ = rand.Read(v.key[:])
	return v
}

// Login is the name and the password of a client.
type Login struct{ Name, password string }

// ReadLogin reads the value of the field Authorization. ok is false if it has no name and password.
func ReadLogin(value string) (l Login, ok bool) {
	scheme, text, _ := strings.Cut(value, " ")
	if !strings.EqualFold(scheme, "basic") {
		return l, false
	}
	all, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
	if err != nil {
		return l, false
	}
	l.Name, l.password, ok = strings.Cut(string(all), ":")
	return l, ok && len(l.Name) <= maxName && len(l.password) <= maxPassword
}

// digest is of a login and the hash that it was right by: another hash makes another one.
func (v *Verifier) digest(u *Users, l Login) (out [sha256.Size]byte) {
	h := hmac.New(sha256.New, v.key[:])
	for _, text := range []string{l.Name, l.password, u.hashes[l.Name].text} {
		_ = binary.Write(h, binary.BigEndian, uint32(len(text))) //nolint:gosec // bounded
		h.Write([]byte(text))
	}
	h.Sum(out[:0])
	return out
}

// Knows reports whether a login was right before, and still is.
func (v *Verifier) Knows(u *Users, l Login) bool {
	d := v.digest(u, l)
	v.mu.Lock()
	defer v.mu.Unlock()
	_, is := v.known[d]
	if _, was := v.before[d]; was && !is {
		v.keep(d)
		is = true
	}
	return is
}

// keep makes a login known. The caller holds mu.
func (v *Verifier) keep(d [sha256.Size]byte) {
	if len(v.known) >= maxKnown {
		v.known, v.before = make(map[[sha256.Size]byte]struct{}, maxKnown), v.known
	}
	v.known[d] = struct{}{}
}

// Verify reports whether a login is right by the users of a namespace. busy means that it has not been looked at: too many others have
// to be.
func (v *Verifier) Verify(ctx context.Context, namespace string, u *Users, l Login) (right, busy bool) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	own := v.share(namespace)
	defer v.leave(namespace, own)
	for _, slots := range []chan struct{}{own.slots, v.slots} {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		case <-ctx.Done():
			return false, true
		}
	}
	if !u.verify(l.Name, l.password) {
		return false, false
	}
	d := v.digest(u, l)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keep(d)
	return true, false
}
