package watch

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/svc"
)

// version is the version of a front, with what it was made of.
type version struct {
	front   *gateway.Front
	secrets uint64 // Watch.secretChanges
	text    string
}

// versionLength is how many bytes of a hash are enough: a front is only compared with itself.
const versionLength = 8

// updateVersions returns the versions of all fronts. Only what has changed costs something. The caller holds mu.
func (w *Watch) updateVersions() map[svc.Name]string {
	maps.DeleteFunc(w.versions, func(n svc.Name, _ version) bool { return w.fronts[n] == nil })
	out := make(map[svc.Name]string, len(w.fronts))
	for n, f := range w.fronts {
		have := w.versions[n]
		if have.front != f || have.secrets != w.secretChanges {
			have = version{f, w.secretChanges, w.versionOf(n, f)}
			w.versions[n] = have
		}
		out[n] = have.text
	}
	return out
}

// versionOf returns the version of a front (State.Versions).
func (w *Watch) versionOf(n svc.Name, f *gateway.Front) string {
	of := struct {
		UIDs         []types.UID
		Gateway      gwv1.GatewayStatus
		Sets         []gwv1.ListenerSetStatus
		Certificates [][][]byte
	}{Gateway: f.Status(nil, "")}
	if g := w.objects.Gateways[n]; g != nil {
		of.UIDs = append(of.UIDs, g.UID)
	}
	silence(of.Gateway.Conditions)
	for i := range of.Gateway.Listeners {
		of.Gateway.Listeners[i].AttachedRoutes = 0
		silence(of.Gateway.Listeners[i].Conditions)
	}
	for _, name := range f.Sets() {
		if s := w.objects.Sets[name]; s != nil {
			of.UIDs = append(of.UIDs, s.UID)
		}
		status := f.SetStatus(name, "")
		silence(status.Conditions)
		for i := range status.Listeners {
			status.Listeners[i].AttachedRoutes = 0
			silence(status.Listeners[i].Conditions)
		}
		of.Sets = append(of.Sets, status)
	}
	for _, name := range slices.SortedFunc(slices.Values(f.Named), svc.Name.Compare) {
		if s := w.secrets[name]; s != nil && s.cert != nil {
			of.Certificates = append(of.Certificates, s.cert.Certificate)
		}
	}
	text, err := json.Marshal(of)
	if err != nil {
		panic(err) // plain values
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:versionLength])
}

// silence removes messages: a node may not read a Secret of another type, so it only knows that it cannot be used.
func silence(conditions []metav1.Condition) {
	for i := range conditions {
		conditions[i].Message = ""
	}
}
