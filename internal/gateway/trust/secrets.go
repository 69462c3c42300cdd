package trust

import "github.com/fairlead/fairlead/internal/svc"

// Missing is the problem of a Secret that does not exist.
const Missing = "it does not exist"

// maxSecretBytes bounds the names of the Secrets that can be used: an annotation of the front's Service has them.
const maxSecretBytes = 128 << 10

// SecretSet collects the Secrets that a front names.
type SecretSet struct {
	// Named have to be followed, and Usable are the ones that nodes need, each once.
	Named, Usable []svc.Name
	most          int
	find          func(svc.Name) (problem string, known bool)
	named, usable map[svc.Name]bool
	problems      map[secretUse]string
	bytes         int
}

// secretUse is a Secret and what it is for.
type secretUse struct {
	svc.Name
	use string
}

// NewSecretSet returns a set of most Secrets at most. find returns why a Secret cannot be used for TLS, "" if it can, and whether it
// exists.
func NewSecretSet(most int, find func(svc.Name) (problem string, known bool)) *SecretSet {
	return &SecretSet{most: most, find: find, named: map[svc.Name]bool{}, usable: map[svc.Name]bool{}, problems: map[secretUse]string{}}
}

// Add adds a Secret for TLS. It returns why it cannot be used, "" if it can.
func (s *SecretSet) Add(n svc.Name) string { return s.AddFor("TLS", n, s.find) }

// AddFor is Add for another use, in which find reports whether a Secret can be used.
func (s *SecretSet) AddFor(use string, n svc.Name, find func(svc.Name) (problem string, known bool)) string {
	key := secretUse{n, use}
	if problem, seen := s.problems[key]; seen {
		return problem
	}
	if !s.named[n] && len(s.Named) == s.most {
		return "there are too many Secrets"
	}
	if !s.named[n] {
		s.named[n] = true
		s.Named = append(s.Named, n)
	}
	problem, known := find(n)
	size := len(n.String()) + len(",")
	switch {
	case !known:
		problem = Missing
	case problem != "" || s.usable[n]:
	case s.bytes+size > maxSecretBytes:
		problem = "there are too many Secrets"
	default:
		s.bytes += size
		s.usable[n] = true
		s.Usable = append(s.Usable, n)
	}
	s.problems[key] = problem
	return problem
}

// SecretRefs returns the references to Secrets.
func SecretRefs(names []svc.Name) (out []Ref) {
	for _, n := range names {
		out = append(out, Ref{Kind: Secret, Name: n})
	}
	return out
}
