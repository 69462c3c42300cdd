// Package claim has what the load balancers' controller and the speakers agree on: how an IPAddress object claims an
// address for Services, what a Service asks for, the list of voters and the speakers' key.
package claim

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// VotersEntry is the entry of the ConfigMap svc.VotersConfigMap: quorum.Lists as JSON.
	VotersEntry = "lists"
	// RebalanceAnnotation of that ConfigMap is another value after each 'fairlead lb rebalance': every speaker then gives the
	// addresses that another one should have to that one.
	RebalanceAnnotation = "fairlead.dev/lb-rebalance"
	// KeyBytes is the least length of a key of the speakers.
	KeyBytes = 32
	// KeyEntry is the entry of the Secret svc.SpeakerKeySecret with the key that signs. Speakers also accept messages
	// that are signed with another entry's key.
	KeyEntry = "key"
)

// ReadVoters returns the lists of voters that a ConfigMap has.
func ReadVoters(m *corev1.ConfigMap) (quorum.Lists, error) {
	var l quorum.Lists
	if err := json.Unmarshal([]byte(m.Data[VotersEntry]), &l); err != nil {
		return quorum.Lists{}, fmt.Errorf("ConfigMap %s/%s, entry %s: %w", svc.SystemNamespace, svc.VotersConfigMap, VotersEntry, err)
	}
	return l, nil
}

// GetVoters reads the lists of voters from the API server, not from a cache. The Version is 0 if there are none.
func GetVoters(ctx context.Context, client kubernetes.Interface) (quorum.Lists, error) {
	m, err := client.CoreV1().ConfigMaps(svc.SystemNamespace).Get(ctx, svc.VotersConfigMap, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return quorum.Lists{}, nil
	}
	if err != nil {
		return quorum.Lists{}, err
	}
	return ReadVoters(m)
}
