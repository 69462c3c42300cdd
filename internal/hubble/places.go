package hubble

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Places bound how many questions are answered at a time.
type Places struct {
	taken chan struct{}
	what  string
}

// NewPlaces returns n Places. what completes the error "N ...; try again later".
func NewPlaces(n int, what string) *Places { return &Places{taken: make(chan struct{}, n), what: what} }

// Take takes a place until the function that it returns is called. Its error is a status.
func (p *Places) Take() (done func(), err error) {
	select {
	case p.taken <- struct{}{}:
		return func() { <-p.taken }, nil
	default:
		return nil, status.Errorf(codes.ResourceExhausted, "%d %s; try again later", cap(p.taken), p.what)
	}
}
