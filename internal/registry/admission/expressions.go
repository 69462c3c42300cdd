package admission

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	"k8s.io/apiserver/pkg/cel"
	"k8s.io/apiserver/pkg/cel/environment"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// maxConditions is how many match conditions a webhook or policy may have.
const maxConditions = 64

// stateless compiles expressions that refer to no variables of a policy. It is made
// at the first use: a server without policies does not need it.
var stateless = sync.OnceValue(func() plugincel.Compiler { //nolint:gochecknoglobals // made once, then constant
	return plugincel.NewCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
})

// expressions compiles the expressions of one object.
type expressions struct {
	compiler plugincel.Compiler
	params   bool
	// stored are the expressions of the object that is replaced: they may use what
	// this version of the server does not offer to new ones.
	stored map[string]bool
}

// compose returns a compiler that keeps the variables of the policy, and has later
// expressions compiled with it.
func (e *expressions) compose() (*plugincel.CompositedCompiler, error) {
	if c, ok := e.compiler.(*plugincel.CompositedCompiler); ok {
		return c, nil
	}
	c, err := plugincel.NewCompositedCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	if err == nil {
		e.compiler = c
	}
	return c, err
}

func (e *expressions) mode(text string) environment.Type {
	if e.stored[text] {
		return environment.StoredExpressions
	}
	return environment.NewExpressions
}

// options are the variables that most expressions see.
func (e *expressions) options() plugincel.OptionalVariableDeclarations {
	return plugincel.OptionalVariableDeclarations{HasParams: e.params, HasAuthorizer: true}
}

// check compiles what x says, which is written as text in the object.
func (e *expressions) check(
	x plugincel.ExpressionAccessor, text string, options plugincel.OptionalVariableDeclarations, path *field.Path,
) field.ErrorList {
	c := e.compiler
	if c == nil {
		c = stateless()
	}
	return celError(path, x.GetExpression(), c.CompileCELExpression(x, options, e.mode(text)).Error)
}

func celError(path *field.Path, text string, err *cel.Error) field.ErrorList {
	switch {
	case err == nil:
		return nil
	case err.Type == cel.ErrorTypeRequired:
		return field.ErrorList{field.Required(path, err.Detail)}
	case err.Type == cel.ErrorTypeInvalid:
		return field.ErrorList{field.Invalid(path, text, err.Detail)}
	}
	return field.ErrorList{field.InternalError(path, err)}
}

func (e *expressions) validateConditions(list []admissionv1.MatchCondition, path *field.Path) (errs field.ErrorList) {
	if len(list) > maxConditions {
		errs = append(errs, field.TooMany(path, len(list), maxConditions))
	}
	alone := expressions{params: e.params, stored: e.stored}
	seen := map[string]bool{}
	for i, c := range list {
		at := path.Index(i)
		if text := strings.TrimSpace(c.Expression); text == "" {
			errs = append(errs, field.Required(at.Child("expression"), ""))
		} else {
			errs = append(errs,
				alone.check(&matchconditions.MatchCondition{Expression: text}, c.Expression, e.options(), at.Child("expression"))...)
		}
		if c.Name == "" {
			errs = append(errs, field.Required(at.Child("name"), ""))
			continue
		}
		errs = append(errs, store.Invalids(at.Child("name"), c.Name, validation.IsQualifiedName(c.Name))...)
		if seen[c.Name] {
			errs = append(errs, field.Duplicate(at.Child("name"), c.Name))
		}
		seen[c.Name] = true
	}
	return errs
}

// validateVariables lets later expressions see the variables.
func (e *expressions) validateVariables(list []admissionv1.Variable, path *field.Path) (errs field.ErrorList) {
	if len(list) == 0 {
		return nil
	}
	c, err := e.compose()
	if err != nil {
		return field.ErrorList{field.InternalError(path, err)}
	}
	for i, v := range list {
		at := path.Index(i)
		if strings.TrimSpace(v.Name) == "" {
			errs = append(errs, field.Required(at.Child("name"), "name is not specified"))
		} else if !isIdentifier(v.Name) {
			errs = append(errs, field.Invalid(at.Child("name"), v.Name, "must be a valid CEL identifier"))
		}
		if strings.TrimSpace(v.Expression) == "" {
			errs = append(errs, field.Required(at.Child("expression"), "expression is not specified"))
			continue
		}
		x := &validating.Variable{Name: v.Name, Expression: v.Expression}
		result := c.CompileAndStoreVariable(x, e.options(), e.mode(v.Expression))
		errs = append(errs, celError(at.Child("expression"), v.Expression, result.Error)...)
	}
	return errs
}

var identifier = regexp.MustCompile(`^[_a-zA-Z][_a-zA-Z0-9]*$`)

// isIdentifier reports whether name is an IDENT of the language definition,
// https://github.com/google/cel-spec/blob/master/doc/langdef.md#syntax
func isIdentifier(name string) bool {
	return identifier.MatchString(name) && !slices.Contains([]string{
		"true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function", "if", "import", "let",
		"loop", "package", "namespace", "return", "var", "void", "while",
	}, name)
}

// parseVersion splits the apiVersion of a kind.
func parseVersion(text string) (group, version string, err error) {
	switch parts := strings.Split(text, "/"); {
	case text == "/":
		return "", "", nil
	case len(parts) == 1:
		return "", parts[0], nil
	case len(parts) == 2:
		return parts[0], parts[1], nil
	}
	return "", "", fmt.Errorf("unexpected GroupVersion string: %v", text)
}

func validateParamKind(k *admissionv1.ParamKind, path *field.Path) (errs field.ErrorList) {
	if k == nil {
		return nil
	}
	at := path.Child("apiVersion")
	group, version, err := parseVersion(k.APIVersion)
	label := func(value string, messages []string) {
		if len(messages) > 0 {
			errs = append(errs, field.Invalid(at, value, strings.Join(messages, ",")))
		}
	}
	switch {
	case k.APIVersion == "":
		errs = append(errs, field.Required(at, ""))
	case err != nil:
		errs = append(errs, field.Invalid(at, k.APIVersion, err.Error()))
	default:
		if group != "" {
			label(group, validation.IsDNS1123Subdomain(group))
		}
		if version == "" {
			errs = append(errs, field.Invalid(at, k.APIVersion, "version must be specified"))
		} else {
			label(version, validation.IsDNS1035Label(version))
		}
	}
	if k.Kind == "" {
		return append(errs, field.Required(path.Child("kind"), ""))
	}
	if messages := validation.IsDNS1035Label(strings.ToLower(k.Kind)); len(messages) > 0 {
		errs = append(errs, field.Invalid(path.Child("kind"), k.Kind,
			"may have mixed case, but should otherwise match: "+strings.Join(messages, ",")))
	}
	return errs
}
