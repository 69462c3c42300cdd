package alloc

import (
	"errors"
	"fmt"
)

// ErrAllocated is returned for an address or port that is taken already. Its
// text is the one that Kubernetes' API gives to users.
var ErrAllocated = errors.New("provided IP is already allocated")

// ErrPortAllocated is ErrAllocated for ports.
var ErrPortAllocated = errors.New("provided port is already allocated")

// FullError reports that a range has no free address or port left.
type FullError struct {
	// Range is the text form of the range, "10.96.0.0/16" or "30000-32767".
	Range string
}

// Error returns the text that users see.
func (e *FullError) Error() string { return "range is full: " + e.Range }

// NotInRangeError reports that an address or port lies outside of the range, or is
// one that the range never gives out (the network and the broadcast address).
type NotInRangeError struct {
	// IP is the text form of the address; it is empty for a port.
	IP string
	// Range is the text form of the range.
	Range string
}

// Error returns the text that Kubernetes' API gives to users.
func (e *NotInRangeError) Error() string {
	if e.IP == "" {
		return "provided port is not in the valid range. The range of valid ports is " + e.Range
	}
	return fmt.Sprintf("the provided IP (%s) is not in the valid range. The range of valid IPs is %s", e.IP, e.Range)
}
