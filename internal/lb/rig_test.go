package lb

import (
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/testbed/process"
)

// rig is a real API server and clients for the test itself.
type rig struct {
	testing.TB
	config *rest.Config // of an administrator
	own    *rest.Config // of the controller, with its own rights
	client kubernetes.Interface
}

func newRig(t testing.TB) *rig {
	t.Helper()
	server := process.StartAPI(t)
	config := server.Admin(t)
	return &rig{TB: t, config: config, own: server.Controllers(t), client: kubernetes.NewForConfigOrDie(config)}
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}
