package apiserver

import (
	"context"
	"crypto/subtle"
	"fmt"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
)

// bootstrapTokens authenticates tokens ID.SECRET by the Secret
// kube-system/bootstrap-token-ID.
type bootstrapTokens struct {
	client kubernetes.Interface
	now    func() time.Time
}

const (
	bootstrapSecretType  = corev1.SecretType("bootstrap.kubernetes.io/token")
	bootstrapGroupPrefix = "system:bootstrappers:"
	bootstrapTimeout     = 10 * time.Second
)

// Forms of a token and of the groups that it may grant.
var (
	bootstrapTokenForm = regexp.MustCompile(`^([a-z0-9]{6})\.([a-z0-9]{16})$`)
	bootstrapGroupForm = regexp.MustCompile(`^system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]$`)
)

// AuthenticateToken has no opinion of tokens of another form.
func (b bootstrapTokens) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	parts := bootstrapTokenForm.FindStringSubmatch(token)
	if parts == nil {
		return nil, false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, bootstrapTimeout)
	defer cancel()
	s, err := b.client.CoreV1().Secrets(metav1.NamespaceSystem).Get(ctx, "bootstrap-token-"+parts[1], metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	value := func(key string) string { return string(s.Data[key]) }
	if s.DeletionTimestamp != nil || s.Type != bootstrapSecretType || value("token-id") != parts[1] ||
		subtle.ConstantTimeCompare(s.Data["token-secret"], []byte(parts[2])) != 1 || value("usage-bootstrap-authentication") != "true" {
		return nil, false, nil
	}
	if text := value("expiration"); text != "" {
		end, err := time.Parse(time.RFC3339, text)
		if err != nil || !b.now().Before(end) {
			return nil, false, nil //nolint:nilerr // an unreadable expiration counts as past
		}
	}
	groups := []string{GroupBootstrappers}
	if text := value("auth-extra-groups"); text != "" {
		for g := range strings.SplitSeq(text, ",") {
			if !bootstrapGroupForm.MatchString(g) {
				return nil, false, fmt.Errorf("bootstrap token %s: %q is not a group it may grant: want %sNAME", parts[1], g, bootstrapGroupPrefix)
			}
			groups = append(groups, g)
		}
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: "system:bootstrap:" + parts[1], Groups: groups}}, true, nil
}
