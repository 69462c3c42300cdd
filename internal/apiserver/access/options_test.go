package access

import (
	"strings"
	"testing"

	genericoptions "k8s.io/apiserver/pkg/server/options"
)

// k8s.io/apiserver checks the numbers of an audit log only if there is one.
func TestNegativeAuditLog(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"", "-"} {
		audit := genericoptions.NewAuditOptions()
		audit.LogOptions.Path, audit.LogOptions.MaxAge = path, -1
		o := AuthOptions{Audit: audit}
		if err := o.Complete(); err == nil || !strings.Contains(err.Error(), "--audit-log-maxage") {
			t.Errorf("with the path %q: %v", path, err)
		}
		audit.LogOptions.MaxAge = 0
		if err := o.Complete(); err != nil {
			t.Errorf("with the path %q and the age 0: %v", path, err)
		}
	}
}
