package dialect

import (
	"fmt"
	"slices"
	"strings"
)

// SchedulerAnnotation names the way in which mode ipvs chooses endpoints for a
// Service. Other modes do not look at it.
const SchedulerAnnotation = "fairlead.dev/ipvs-scheduler"

// maxShown bounds how much of a wrong value an error repeats.
const maxShown = 40

// Scheduler returns the scheduler that the annotations of a Service ask for, one
// of those that this node has, or "" if they ask for none.
func Scheduler(annotations map[string]string, has []string) (string, error) {
	v, asked := annotations[SchedulerAnnotation]
	v = strings.TrimSpace(v)
	if !asked || v == "" || slices.Contains(has, v) {
		return v, nil
	}
	return "", fmt.Errorf("annotation %s: scheduler %q is not one of those that this node has (%s); the node's default serves",
		SchedulerAnnotation, shorten(v), strings.Join(has, ", "))
}
