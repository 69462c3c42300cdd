package trust

import "github.com/fairlead/fairlead/internal/svc"

// maxSecretBytes bounds the names of the Secrets that can be used: an annotation of the front's Service has them.
const maxSecretBytes = 128 << 10

// SecretSet collects the Secrets that a front names.
type SecretSet struct {
	// Named have to be followed, and Usable are the ones that nodes need.
	Named, Usable []svc.Name
	most          int
	find          func(svc.Name) (problem string, known bool)
	problems      map[svc.Name]string
	bytes         int
}

// NewSecretSet returns a set of most Secrets at most. find returns why a Secret cannot be used, "" if it can, and whether it exists.
func NewSecretSet(most int, find func(svc.Name) (problem string, known bool)) *SecretSet {
	return &SecretSet{most: most, find: find, problems: map[svc.Name]string{}}
}

// Add adds a Secret. It returns why it cannot be used, "" if it can.
func (s *SecretSet) Add(n svc.Name) string {
	if problem, seen := s.problems[n]; seen {
		return problem
	}
	if len(s.Named) == s.most {
		return "there are too many Secrets"
	}
	s.Named = append(s.Named, n)
	problem, known := s.find(n)
	size := len(n.String()) + len(",")
	switch {
	case !known:
		problem = "it does not exist"
	case problem == "" && s.bytes+size > maxSecretBytes:
		problem = "there are too many Secrets"
	case problem == "":
		s.bytes += size
		s.Usable = append(s.Usable, n)
	}
	s.problems[n] = problem
	return problem
}

// SecretRefs returns the references to Secrets.
func SecretRefs(names []svc.Name) (out []Ref) {
	for _, n := range names {
		out = append(out, Ref{Kind: Secret, Name: n})
	}
	return out
}
