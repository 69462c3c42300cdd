package dialect

import (
	"fmt"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

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
