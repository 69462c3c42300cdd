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
