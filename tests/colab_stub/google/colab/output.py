def enable_custom_widget_manager(*args, **kwargs):
    return None
