package dialect

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// maxShown bounds how much of a wrong value an error repeats.
const maxShown = 40

// Scheduler returns the scheduler that the annotations of a Service ask for, if
// this node has it, or "" if they ask for none.
func Scheduler(annotations map[string]string, has []string) (string, error) {
	v, asked := annotations[svc.SchedulerAnnotation]
	v = strings.TrimSpace(v)
	if !asked || v == "" || slices.Contains(has, v) {
		return v, nil
	}
	return "", fmt.Errorf("annotation %s: scheduler %q is not available on this node (available: %s); the node's default serves",
		svc.SchedulerAnnotation, shorten(v), strings.Join(has, ", "))
}

// Forwarding reports whether the annotations of a Service ask for direct return. all is what counts without the annotation,
// unable returns why this node has no direct return, nil if it has; it is asked only where that matters.
func Forwarding(annotations map[string]string, all bool, unable func() error) (direct bool, err error) {
	switch v := strings.TrimSpace(annotations[svc.ForwardingAnnotation]); v {
	case "":
		return all && unable() == nil, nil
	case svc.ForwardingNAT:
		return false, nil
	case svc.ForwardingDirect:
		if err := unable(); err != nil {
			return false, fmt.Errorf("annotation %s: %s has no effect on this node: %w", svc.ForwardingAnnotation, v, err)
		}
		return true, nil
	default:
		return all && unable() == nil, fmt.Errorf("annotation %s: %q has no effect; want %s or %s", svc.ForwardingAnnotation, shorten(v),
			svc.ForwardingDirect, svc.ForwardingNAT)
	}
}
