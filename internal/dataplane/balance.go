package dataplane

import (
	"fmt"
	"time"

	"github.com/fairlead/fairlead/internal/table"
)

// Balance is how an endpoint is chosen for a new connection.
type Balance uint8

// The ways to choose.
const (
	Random Balance = iota
	RoundRobin
)

// ParseBalance reads the value of --balance.
func ParseBalance(s string) (Balance, error) {
	switch s {
	case "", "random":
		return Random, nil
	case "roundrobin":
		return RoundRobin, nil
	}
	return 0, fmt.Errorf("balance %q is not one of random, roundrobin", s)
}

// Masquerading is which connections of a frontend get this node's address.
type Masquerading uint8

// The answers.
const (
	MasqueradeNone    Masquerading = iota
	MasqueradeAlways               // all
	MasqueradeOutside              // clients outside the pods' ranges
)

// MasqueradingOf is what a frontend and the Settings of its Table ask for.
func MasqueradingOf(s *Settings, f *table.Frontend) Masquerading {
	switch {
	case f.Masquerade, f.Kind == table.ClusterIP && s.MasqueradeAll:
		return MasqueradeAlways
	case f.Kind == table.ClusterIP && len(s.Pods)+len(s.PodInterfaces) > 0:
		return MasqueradeOutside
	}
	return MasqueradeNone
}

// AffinitySeconds is for how many whole seconds a client sticks to its endpoint,
// 0 if it does not.
func AffinitySeconds(p *table.ServicePort) uint32 {
	return uint32((p.Affinity + time.Second - 1) / time.Second)
}
