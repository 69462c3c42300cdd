package lb

import (
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
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
	server := apiservertest.StartServer(t)
	config := rest.CopyConfig(server.LoopbackConfig())
	config.QPS = -1
	return &rig{TB: t, config: config, own: server.ControllersConfig(), client: kubernetes.NewForConfigOrDie(config)}
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}
