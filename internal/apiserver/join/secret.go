package join

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A join token is valid while its Secret exists, of kubeadm's form
// (https://kubernetes.io/docs/reference/access-authn-authz/bootstrap-tokens), and
// until its expiration.
const (
	SecretType      = corev1.SecretType("bootstrap.kubernetes.io/token")
	SecretNamespace = metav1.NamespaceSystem
	secretPrefix    = "bootstrap-token-"

	// UsageJoin and UsageApproval are the keys that are "true" in the Secret of a token: kubeadm's for
	// one whose requests the server approves, and that of one whose requests an administrator approves.
	// No earlier version accepts the latter.
	UsageJoin     = "usage-bootstrap-authentication"
	UsageApproval = "usage-fairlead-approval"

	// nodesKey is the key of the number of nodes that may join with a token, and joinedKey that of the requests that
	// were approved with it: a line each, the request's name and the node's.
	nodesKey  = "fairlead-nodes"
	joinedKey = "fairlead-joined"

	// DefaultNodes is for how many nodes a token is unless another number is asked for, MaxNodes the largest number.
	DefaultNodes = 1
	MaxNodes     = 1000

	// DefaultLife is how long a token is valid unless another end is asked for.
	DefaultLife = 24 * time.Hour
)

// SecretName returns the name of the Secret of the token with an ID.
func SecretName(id string) string { return secretPrefix + id }

// Object returns the Secret by which servers know the token of a number of nodes until end; the zero time
// means forever.
func (t Token) Object(end time.Time, nodes int, description string) *corev1.Secret {
	usage := UsageJoin
	if t.Approval {
		usage = UsageApproval
	}
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: SecretNamespace, Name: SecretName(t.ID)},
		Type:       SecretType,
		StringData: map[string]string{
			"token-id": t.ID, "token-secret": t.Secret, "description": description, usage: "true",
		},
	}
	if !t.Approval {
		s.StringData[nodesKey] = strconv.Itoa(nodes)
	}
	if !end.IsZero() {
		s.StringData["expiration"] = end.UTC().Format(time.RFC3339)
	}
	return s
}

// Listed is what may be shown of a token.
type Listed struct {
	ID, Description string
	// Approval is that of Token.
	Approval bool
	// Nodes is how many nodes may join with the token, and Joined are the names of the ones that have.
	Nodes  int
	Joined []string
	// End is the zero time for a token that does not expire.
	End time.Time
}

// List reads a Secret. The error is that of a Secret that is no token.
func List(s *corev1.Secret) (Listed, error) {
	id, ok := strings.CutPrefix(s.Name, secretPrefix)
	if !ok || s.Type != SecretType || string(s.Data["token-id"]) != id {
		return Listed{}, errors.New("the Secret is no token")
	}
	l := Listed{ID: id, Description: string(s.Data["description"]), Approval: string(s.Data[UsageApproval]) == "true"}
	var err error
	if text := string(s.Data["expiration"]); text != "" {
		if l.End, err = time.Parse(time.RFC3339, text); err != nil {
			return Listed{}, err
		}
	}
	l.Nodes = DefaultNodes // as tokens of earlier releases and of kubeadm's form, which name no number
	if text := string(s.Data[nodesKey]); text != "" {
		if l.Nodes, err = strconv.Atoi(text); err != nil {
			return Listed{}, fmt.Errorf("%s is %q: want a number", nodesKey, text)
		}
	}
	for _, node := range joinedOf(s) {
		l.Joined = append(l.Joined, node)
	}
	slices.Sort(l.Joined)
	return l, nil
}

// joinedOf returns the nodes that have joined with a token, by the names of their requests.
func joinedOf(s *corev1.Secret) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(string(s.Data[joinedKey])) {
		if request, node, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			out[request] = node
		}
	}
	return out
}

// UsedUp returns an error if no further node may join with the token.
func (l Listed) UsedUp() error {
	if len(l.Joined) < l.Nodes {
		return nil
	}
	return fmt.Errorf("the join token %s is for %d nodes, and as many have joined with it: make another one with 'fairlead token create', "+
		"with --nodes for several machines", l.ID, l.Nodes)
}

// Count counts the approved request of a node in the token's Secret s, and reports whether that changed s. The error is
// that of UsedUp, or of a Secret that is no token.
func Count(s *corev1.Secret, request, node string) (changed bool, err error) {
	l, err := List(s)
	if err != nil {
		return false, err
	}
	if _, counted := joinedOf(s)[request]; counted {
		return false, nil
	}
	if err := l.UsedUp(); err != nil {
		return false, err
	}
	s.Data[joinedKey] = append(s.Data[joinedKey], request+" "+node+"\n"...)
	return true, nil
}

// SetNodes sets for how many nodes the token with the Secret s is, and reports whether that changed s.
func SetNodes(s *corev1.Secret, nodes int) (changed bool) {
	text := strconv.Itoa(nodes)
	if string(s.Data[nodesKey]) == text {
		return false
	}
	s.Data[nodesKey] = []byte(text)
	return true
}

// Expired reports whether the token is no longer valid.
func (l Listed) Expired(now time.Time) bool { return !l.End.IsZero() && !now.Before(l.End) }
