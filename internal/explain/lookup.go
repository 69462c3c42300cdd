package explain

import "github.com/fairlead/fairlead/internal/svc"

// Resolve returns the Service that a question leads to by its name, not set if it leads to none or asks for an
// address. What it finds out is in no Verdict.
func Resolve(q *Question, o *Objects) svc.Name {
	switch {
	case q.Service != (svc.Name{}):
		return q.Service
	case q.Name == "":
		return svc.Name{}
	}
	e := &explaining{question: q, objects: o, facts: &Facts{}, verdict: &Verdict{}}
	if !e.name() {
		return svc.Name{}
	}
	return e.target
}
