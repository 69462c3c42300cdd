package access

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/fairlead/fairlead/internal/svc"
)

// nodeIdentity is the annotation of a Node with the UID in the certificate of the
// machine that registered it. A machine that joins gets a new UID and keeps it through
// all renewals, so that certificates of an earlier machine of that name do not count
// for the Node. A Node without the annotation is any machine's of its name: one made
// by hand, until a node registers it, or that of a server's own process.
const nodeIdentity = "fairlead.dev/node-identity"

// identityToken is before the ID of the token in the identity of a node that joined with one and without an
// administrator's approval.
const identityToken = "."

// tokenIn returns the token in a node's identity, "" if it has none.
func tokenIn(identity string) string {
	_, token, _ := strings.Cut(identity, identityToken)
	return token
}

// registered reports whether a machine has registered n, or acts for it.
func registered(n *corev1.Node) bool {
	if n.Annotations[nodeIdentity] != "" {
		return true
	}
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == corev1.NodeReady {
			return true
		}
	}
	return false
}

// identity returns the UID of a node's new certificate: that of the certificate with
// which the node asked for it, else a new one, to which its Node, if there is one, is
// bound: an administrator has approved that, or no machine has registered it.
func (s *signer) identity(ctx context.Context, c *certificatesv1.CertificateSigningRequest, node string) (string, error) {
	self := c.Spec.Username == svc.NodeUserPrefix+node
	if self {
		if err := s.still(ctx, c, node); err != nil {
			return "", err
		}
	}
	if self && c.Spec.UID != "" {
		return c.Spec.UID, nil
	}
	id := string(c.UID)
	if token := tokenOf(c); token != "" && autoApproved(c) {
		id += identityToken + token
	}
	if self {
		return id, nil // of an earlier release: the node binds its Node when it has the certificate
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{nodeIdentity: id}}})
	if err != nil {
		return "", err
	}
	_, err = s.client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return "", fmt.Errorf("cannot bind Node %s to its new certificate: %w", node, err)
	}
	return id, nil
}

// errNotStill is the error of a node whose Node is no longer that of its certificate.
var errNotStill = errors.New("the Node of this machine was deleted")

// still returns an error if the Node of a node that renews its certificate was deleted since it asked.
func (s *signer) still(ctx context.Context, c *certificatesv1.CertificateSigningRequest, node string) error {
	n, err := s.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err == nil && s.removed.mayAct(n, &user.DefaultInfo{Name: c.Spec.Username, UID: c.Spec.UID}) {
		return nil
	}
	if err == nil || apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: %w", errNotStill, errRemoved(node))
	}
	return err
}

var _ admission.MutationInterface = nodeRestriction{}

// Admit binds a Node to the certificate of the node that makes it, or is the first to
// change it; a node cannot change that afterwards.
func (n nodeRestriction) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if r := a.GetResource(); r.Group != "" || r.Resource != "nodes" || a.GetOperation() == admission.Delete {
		return nil
	}
	if _, ok := NodeOf(a.GetUserInfo()); !ok {
		return nil
	}
	now, ok := a.GetObject().(*corev1.Node)
	if !ok {
		return nil // Validate rejects it
	}
	id := a.GetUserInfo().GetUID()
	if old, ok := a.GetOldObject().(*corev1.Node); ok && old != nil && old.Annotations[nodeIdentity] != "" {
		id = old.Annotations[nodeIdentity]
	}
	if id == "" {
		delete(now.Annotations, nodeIdentity)
		return nil
	}
	metav1.SetMetaDataAnnotation(&now.ObjectMeta, nodeIdentity, id)
	return nil
}
