from planted_defects import Defect
INVENTED: tuple[Defect, ...] = ()
