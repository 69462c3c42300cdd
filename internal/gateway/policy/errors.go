package policy

import "slices"

// The statuses that a page can take the place of, as in ingress-nginx.
const (
	LeastError = 400
	MostError  = 599
)

// Errors are the answers that a page of another backend takes the place of.
type Errors struct {
	// Codes are statuses from LeastError to MostError.
	Codes []int
	// Own leaves answers of Pods as they are: pages take the place of the load balancer's own answers.
	Own bool
}

// Has reports whether a page takes the place of an answer with a status. own is true for one of the load balancer.
func (e *Errors) Has(status int, own bool) bool {
	return (own || !e.Own) && slices.Contains(e.Codes, status)
}
