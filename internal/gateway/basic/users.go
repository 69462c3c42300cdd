// Package basic verifies the names and passwords of clients by the hashes of a Secret (RFC 7617; htpasswd of Apache).
package basic

import (
	"crypto/sha1" //nolint:gosec // as htpasswd -s has it
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/GehirnInc/crypt"
	"github.com/GehirnInc/crypt/apr1_crypt"
	"github.com/GehirnInc/crypt/md5_crypt"
	"github.com/GehirnInc/crypt/sha256_crypt"
	"github.com/GehirnInc/crypt/sha512_crypt"
	"golang.org/x/crypto/bcrypt"

	"github.com/fairlead/fairlead/internal/svc"
)

// Bounds of what a Secret may ask of a node.
const (
	maxUsers  = 10_000
	maxName   = 255 // bytes
	maxHash   = 255
	maxCost   = 14        // of bcrypt, each step doubles the time: 14 takes about a second
	maxRounds = 1_000_000 // of SHA-crypt, likewise
	// maxPassword is how many bytes of a password are looked at: SHA-crypt takes longer for each.
	maxPassword = 256
)

// Source is where names and hashes are: a file of htpasswd in the entry Entry of a Secret, or, if Map, its entries.
type Source struct {
	Secret svc.Name
	Map    bool
}

// Entry of a Secret has a file of htpasswd.
const Entry = "auth"

// Rule has clients give a name and a password of a Source.
type Rule struct {
	Source
	Realm string
}

// Users are the names and the hashes of a Secret. They do not change.
type Users struct {
	hashes map[string]hash
	// decoy is the hash that takes longest: whoever tries a name that does not exist waits as long.
	decoy hash
}

// hash is the hash of a password.
type hash struct {
	text string
	kind kind
	cost int
}

// kind is a form of hashes. A later one takes longer, with the costs that are usual.
type kind int

const (
	ofSHA kind = iota // {SHA}
	ofSSHA
	ofMD5 // $1$
	ofAPR1
	ofSHA256
	ofSHA512
	ofBcrypt // bcrypt
)

// crypts are the programs of the forms of crypt(3).
//
//nolint:gochecknoglobals // constant
var crypts = map[kind]func() crypt.Crypter{
	ofMD5: md5_crypt.New, ofAPR1: apr1_crypt.New, ofSHA256: sha256_crypt.New, ofSHA512: sha512_crypt.New,
}

// prefixes are how hashes begin.
//
//nolint:gochecknoglobals // constant
var prefixes = []struct {
	text string
	kind kind
}{
	{"$2a$", ofBcrypt}, {"$2b$", ofBcrypt}, {"$2y$", ofBcrypt}, {"$apr1$", ofAPR1}, {"$1$", ofMD5}, {"$5$", ofSHA256}, {"$6$", ofSHA512},
	{"{SHA}", ofSHA}, {"{SSHA}", ofSSHA},
}

// ReadFile reads lines NAME:HASH as htpasswd writes them. problem is why they cannot be used, "" if they can; it has no part of a hash.
func ReadFile(text []byte) (u *Users, problem string) {
	all, n := map[string]string{}, 0
	for line := range strings.Lines(string(text)) {
		n++
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		name, rest, ok := strings.Cut(line, ":")
		if !ok || name == "" {
			return nil, fmt.Sprintf("line %d is not NAME:HASH, as htpasswd writes it", n)
		}
		hash, _, _ := strings.Cut(rest, ":") // a comment may follow
		if _, again := all[name]; !again {
			all[name] = hash
		}
	}
	return read(all)
}

// ReadMap reads hashes by name.
func ReadMap(data map[string][]byte) (u *Users, problem string) {
	all := make(map[string]string, len(data))
	for name, hash := range data {
		all[name] = strings.TrimSpace(string(hash))
	}
	return read(all)
}

func read(all map[string]string) (*Users, string) {
	if len(all) == 0 || len(all) > maxUsers {
		return nil, fmt.Sprintf("it has %d users; want 1 to %d", len(all), maxUsers)
	}
	u := &Users{hashes: make(map[string]hash, len(all))}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		h, wrong := parse(all[name])
		if wrong == "" && len(name) > maxName {
			wrong = fmt.Sprintf("the name has more than %d bytes", maxName)
		}
		if wrong != "" {
			return nil, fmt.Sprintf("user %.60q: %s", name, wrong)
		}
		if u.hashes[name] = h; h.kind > u.decoy.kind || h.kind == u.decoy.kind && h.cost >= u.decoy.cost {
			u.decoy = h
		}
	}
	return u, ""
}

// Equal reports whether two have the same names and hashes.
func (u *Users) Equal(o *Users) bool { return u != nil && o != nil && maps.Equal(u.hashes, o.hashes) }

// parse reads a hash. wrong is why it cannot be used.
func parse(text string) (h hash, wrong string) {
	const want = "the hash has no form that is served; want one of bcrypt (htpasswd -B), APR1, SHA-crypt, {SHA}, {SSHA}"
	i := slices.IndexFunc(prefixes, func(p struct {
		text string
		kind kind
	}) bool {
		return strings.HasPrefix(text, p.text)
	})
	if i < 0 || len(text) > maxHash {
		return h, want
	}
	h = hash{text: text, kind: prefixes[i].kind}
	var err error
	switch h.kind {
	case ofBcrypt:
		if h.cost, err = bcrypt.Cost([]byte(text)); err == nil && h.cost > maxCost {
			return h, fmt.Sprintf("bcrypt with a cost of %d takes too long; want at most %d", h.cost, maxCost)
		}
	case ofSHA, ofSSHA:
		if sum, _ := h.digest(); sum == nil {
			return h, want
		}
	default:
		if h.cost, err = crypts[h.kind]().Cost(text); err == nil && h.cost > maxRounds {
			return h, fmt.Sprintf("%d rounds take too long; want at most %d", h.cost, maxRounds)
		}
	}
	if err != nil {
		return h, want
	}
	return h, ""
}

// digest returns the SHA-1 of a hash, and its salt. Both are nil if it has none.
func (h *hash) digest() (sum, salt []byte) {
	_, text, _ := strings.Cut(h.text, "}")
	all, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(all) < sha1.Size || h.kind == ofSHA && len(all) > sha1.Size {
		return nil, nil
	}
	return all[:sha1.Size], all[sha1.Size:]
}

// matches reports whether a hash is of a password. It takes as long for a wrong one.
func (h *hash) matches(password string) bool {
	switch h.kind {
	case ofBcrypt:
		return bcrypt.CompareHashAndPassword([]byte(h.text), []byte(password)) == nil
	case ofSHA, ofSSHA:
		sum, salt := h.digest()
		got := sha1.Sum(append([]byte(password), salt...)) //nolint:gosec // as htpasswd -s has it
		return subtle.ConstantTimeCompare(got[:], sum) == 1
	}
	// Verify of the library takes a part of the hash for the salt if that is short and comes after "rounds=".
	setting := h.text[:max(0, strings.LastIndexByte(h.text, '$'))]
	got, err := crypts[h.kind]().Generate([]byte(password), []byte(setting))
	return err == nil && subtle.ConstantTimeCompare([]byte(got), []byte(h.text)) == 1
}

// verify reports whether a user has a password. It takes as long for each user, and for a name that is no user's.
func (u *Users) verify(name, password string) bool {
	h, known := u.hashes[name]
	if !known {
		h = u.decoy
	}
	right := h.matches(password)
	if h.kind != u.decoy.kind || h.cost != u.decoy.cost {
		u.decoy.matches(password)
	}
	return right && known
}
